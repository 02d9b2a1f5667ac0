#include "core/dtype.h"
#include "core/tile_schedule.h"
#include "cuda/dropout_mask.h"
#include "cuda/launch.cuh"

namespace flashattn::cuda {
namespace {

struct PackedBlock {
  uint4 half[2];
};

// One thread per block of columns of one row, consecutive threads along the row.
__global__ void dropout_mask_kernel(DropoutMaskProblem problem, int64_t blocks_per_row,
                                    int64_t total) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= total) return;
  const int64_t row = index / blocks_per_row;  // of (batch, heads_q, len_q)
  const int64_t begin = index % blocks_per_row * kDropoutBlock;
  const int64_t batch_head = row / problem.len_q;
  const DropoutStream stream = problem.dropout.stream(batch_head / problem.heads_q, problem.heads_q,
                                                      batch_head % problem.heads_q);
  const DropoutBlock block = dropout_block(stream, row % problem.len_q, begin / kDropoutBlock);

  bool* out = problem.mask + row * problem.len_k + begin;
  if (problem.len_k % kDropoutBlock == 0) {  // then every block is whole and aligned
    const auto words = bit_cast<PackedBlock>(block);
    reinterpret_cast<uint4*>(out)[0] = words.half[0];
    reinterpret_cast<uint4*>(out)[1] = words.half[1];
  } else {
#pragma unroll
    for (int i = 0; i < kDropoutBlock; ++i) {
      if (begin + i < problem.len_k) out[i] = block.keep[i];
    }
  }
}

}  // namespace

void dropout_mask(const DropoutMaskProblem& problem, int device) {
  const OpScope scope("dropout_mask", device);
  constexpr int kThreads = 256;
  const int64_t blocks_per_row = divide_up(problem.len_k, kDropoutBlock);
  const int64_t total = problem.batch * problem.heads_q * problem.len_q * blocks_per_row;
  launch(scope, {divide_up(total, kThreads), kThreads}, dropout_mask_kernel, problem,
         blocks_per_row, total);
}

}  // namespace flashattn::cuda
