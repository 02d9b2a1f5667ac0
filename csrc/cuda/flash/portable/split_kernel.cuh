// Joins what the forward kernel made of runs of keys: out = sum of weight * partial out, by the
// runs' shares of the whole sum of exponentials.
#pragma once

#include "cuda/attend/softmax_step.cuh"
#include "cuda/flash/arguments.h"

namespace flashattn::cuda::portable {

inline constexpr int kMostSplits = 64;
inline constexpr int kJoinWarps = 4;

// A block makes one row, a thread some of its columns. Each warp works out the weights for itself.
template <class Element>
__global__ void __launch_bounds__(32 * kJoinWarps)
    flash_join_splits_kernel(const __grid_constant__ ForwardArguments a) {
  using Real = Accumulator<Element>;
  __shared__ Real weights[kJoinWarps][kMostSplits];
  const AttentionProblem& p = a.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = blockIdx.x, rows = a.rows();
  const int64_t row = index % p.sequences.storage_q, pair = index / p.sequences.storage_q;
  const int64_t head = pair % p.heads_q, batch = pair / p.heads_q;

  const Real* const lse = static_cast<const Real*>(a.partial_lse) + index;
  OnlineSoftmax<Real> state;
  for (int split = lane; split < a.splits; split += 32) {
    if (lse[split * rows] != kNegativeInfinity<Real>) state.add(lse[split * rows]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    state.merge({__shfl_xor_sync(0xffffffffu, state.max, distance),
                 __shfl_xor_sync(0xffffffffu, state.sum, distance)});
  }
  const LogSumExp<Real> joined = state.log_sum_exp();
  for (int split = lane; split < a.splits; split += 32) {
    weights[warp][split] = probability(lse[split * rows], joined);
  }
  __syncwarp();
  const auto out = a.outputs.out.as<Element>(), out_low = a.outputs.out_low.as<Element>();
  const Real* const partial = static_cast<const Real*>(a.partial_out) + index * p.head_dim_v;
  for (int column = threadIdx.x; column < p.head_dim_v; column += 32 * kJoinWarps) {
    Real sum = 0;
#pragma unroll 16
    for (int split = 0; split < a.splits; ++split) {
      const Real weight = weights[warp][split];
      const Real value = partial[split * rows * p.head_dim_v + column];
      sum += weight != 0 ? weight * value : Real(0);
    }
    *out.at(batch, head, row, column) = convert<Element>(sum);
    if (out_low) {
      *out_low.at(batch, head, row, column) = convert<Element>(rounding_error<Element>(sum));
    }
  }
  if (threadIdx.x == 0) {
    *a.outputs.lse.as<Real>().at(batch, head, row) = joined.high;
    const auto lse_low = a.outputs.lse_low.as<Real>();
    if (lse_low) *lse_low.at(batch, head, row) = joined.low;
  }
}

}  // namespace flashattn::cuda::portable
