// What the flash attention kernels are launched with, and how blocks become tasks.
#pragma once

#include "core/problem.h"
#include "core/tile_schedule.h"

namespace flashattn::cuda {

struct ForwardTask {
  int64_t batch, head;
  int64_t row;       // first query row, inside the sequence
  int value_column;  // first column of value and out
};

struct ForwardArguments {
  AttentionProblem problem;
  ForwardOutputs outputs;
  int64_t row_tile = 0;        // rows per block
  int value_tile = 0;          // value columns per block
  int64_t parts = 0;           // row tiles of the longest sequence
  int value_parts = 0;         // value tiles
  bool chunked_query = false;  // rows consist of whole, aligned 16-byte chunks
  bool chunked_key = false;
  bool chunked_value = false;
  bool paired_out = false;  // neighbouring elements of out may be stored together

  int64_t blocks() const { return problem.sequences.count * problem.heads_q * value_parts * parts; }

  // Neighbouring blocks share their keys; late rows, which see most under a causal mask, go first.
  FLASHATTN_HD ForwardTask task(int64_t block) const {
    const int64_t part = parts - 1 - block % parts;
    block /= parts;
    const int value_part = static_cast<int>(block % value_parts);
    block /= value_parts;
    return {block / problem.heads_q, block % problem.heads_q, part * row_tile,
            value_part * value_tile};
  }
};

// Backward's passes. `deltas` are the row terms; sums over rows that are shared by several blocks
// go to partial sums, which a last pass adds in order.
struct BackwardArguments {
  AttentionProblem problem;
  BackwardInputs inputs;
  BackwardOutputs outputs;
  UntypedView4 deltas;            // (batch, heads_q, len_q, 1), accumulator type
  void* partial_sinks = nullptr;  // (batch, heads_q, row_parts), accumulator type; may be null
  void* partial_alibi = nullptr;  // (batch, heads_q, row_parts), accumulator type; may be null
  int64_t row_parts = 0;          // row tiles of the longest sequence, by the kernel's tile
  bool chunked_query = false, chunked_key = false, chunked_value = false, chunked_grad_out = false;
};

// True when rows of the view (at any batch, head and row) are whole, aligned 16-byte chunks.
inline bool is_chunked(const UntypedView4& view, int element_size) {
  const int chunk = 16 / element_size;
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride[3] == 1 &&
                 view.size[3] % chunk == 0;
  for (int d = 0; d < 3; ++d)
    aligned = aligned && (view.size[d] <= 1 || view.stride[d] % chunk == 0);
  return aligned;
}

}  // namespace flashattn::cuda
