// What the flash attention kernels are launched with, and how blocks become tasks.
#pragma once

#include "core/problem.h"
#include "core/tile_schedule.h"
#include "cuda/attend/mask_summary.cuh"
#include "cuda/flash/block_order.h"

namespace flashattn::cuda {

// Which operands consist of whole, aligned 16-byte chunks along their last dimension.
struct Chunked {
  bool query = false, key = false, value = false, out = false, grad_out = false;
  bool grad_query = false, grad_key = false, grad_value = false;
  bool mask = false;  // attn_mask
  bool bias = false;  // eight neighbouring keys of attn_mask are one aligned piece
};

struct ForwardTask {
  int batch, head;
  int row;           // first query row, inside the sequence
  int value_column;  // first column of value and out
  int split;         // which run of key tiles
};

struct ForwardArguments {
  AttentionProblem problem;
  ForwardOutputs outputs;
  Chunked chunked;
  MaskSummary mask_summary;
  Divisor value_parts;  // value tiles
  Divisor heads, group;
  BlockOrder order;  // of row tiles: of the longest sequence, or of all packed sequences
  // Every sequence has one query row, and what the views call rows are the heads of a group: its
  // keys are then read once (see heads_as_rows).
  bool rows_are_heads = false;
  // Where row tiles are too few to fill the GPU, each one's keys are split into runs, whose results
  // a last kernel joins (split_kernel.cuh): (splits, batch, heads_q, len_q, head_dim_v) and
  // (splits, batch, heads_q, len_q) of LogSumExp, accumulator type.
  Divisor splits;
  void *partial_out = nullptr, *partial_lse = nullptr;

  FLASHATTN_HD int64_t rows() const {
    return problem.sequences.count * problem.heads_q * problem.sequences.storage_q;
  }
  // Neighbouring blocks share their keys; late rows, which see most under a causal mask, go first.
  // The rows of packed sequences are counted through all of them (packed_tiles.cuh).
  template <int RowTile, int ValueTile>
  FLASHATTN_HD ForwardTask task(int block) const {
    const BlockOrder::Place place = order[block];
    const Divisor::Result split = splits.divide(place.head);
    const Divisor::Result value_part = value_parts.divide(split.quotient);
    const Divisor::Result head = heads.divide(value_part.quotient);
    return {head.quotient, head.rest, (order.parts() - 1 - place.part) * RowTile,
            value_part.rest * ValueTile, split.rest};
  }
};

// Backward's workspace keeps numbers of every row tile together: rows are padded to whole tiles of
// kPaddedRows, sequence by sequence.
inline constexpr int kPaddedRows = 64;

struct PaddedRows {
  int64_t batch_stride = 0, head_stride = 0;  // in rows; packed batches share one stride

  static PaddedRows of(const AttentionProblem& p) {
    const Sequences& s = p.sequences;
    PaddedRows rows;
    rows.head_stride = s.packed() ? (s.storage_q / kPaddedRows + s.count + 1) * kPaddedRows
                                  : divide_up(s.storage_q, kPaddedRows) * kPaddedRows;
    rows.batch_stride = s.packed() ? 0 : p.heads_q * rows.head_stride;
    return rows;
  }
  int64_t count(const AttentionProblem& p) const {
    return (p.sequences.packed() ? 1 : p.sequences.count) * p.heads_q * head_stride;
  }
  // Where a sequence's rows begin. Packed sequences begin at a whole tile: each may leave less than
  // a tile unused.
  FLASHATTN_HD int64_t begin(const AttentionProblem& p, const Sequence& sequence, int batch,
                             int head) const {
    const int64_t first =
        p.sequences.packed() ? (sequence.q_begin / kPaddedRows + batch) * kPaddedRows : 0;
    return batch * batch_stride + head * head_stride + first;
  }
};

// What the backward kernel does for the gradient of attn_mask: leave it to a kernel of its own,
// store the score gradients, or, where several are summed, add them.
enum class MaskGradient : uint8_t { elsewhere, stored, added };

struct BackwardArguments {
  AttentionProblem problem;
  BackwardInputs inputs;
  BackwardOutputs outputs;
  Chunked chunked;
  MaskSummary mask_summary;
  MaskGradient mask_gradient = MaskGradient::elsewhere;
  bool deterministic = false;
  Divisor row_parts;  // row tiles of the longest sequence, by the kernel's tile
  Divisor slices;     // of the head dims
  Divisor heads, heads_kv, group;
  BlockOrder order;  // of key tiles: of the longest sequence, or of all packed sequences
  PaddedRows padded;
  // Accumulator type, by padded row: lse split as the scores want it, and the row terms.
  void *lse_high = nullptr, *lse_low = nullptr, *deltas = nullptr;
  void* grad_query = nullptr;     // sums, tile by tile in the order of the kernel's accumulators
  int* turns = nullptr;           // deterministic: how many key tiles have added to a row tile
  void* partial_sinks = nullptr;  // (batch, heads_q, row_parts); may be null
};

// True when rows of the view (at any batch, head and row) are whole, aligned pieces.
inline bool is_chunked(const UntypedView4& view, int element_size, int chunk, int bytes = 16) {
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.stride[3] == 1 &&
                 view.size[3] % chunk == 0;
  for (int d = 0; d < 3; ++d) {
    aligned = aligned && (view.size[d] <= 1 || view.stride[d] % chunk == 0);
  }
  return aligned && chunk * element_size >= bytes;
}

}  // namespace flashattn::cuda
