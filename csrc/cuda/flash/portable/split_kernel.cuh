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

  const auto* const lse = static_cast<const LogSumExp<Real>*>(a.partial_lse) + index;
  Real max = kNegativeInfinity<Real>, sum = 0;
  for (int split = lane; split < a.splits.value(); split += 32)
    max = larger(max, lse[split * rows].high);
  max = warp_max(max);
  for (int split = lane; split < a.splits.value(); split += 32) {
    const LogSumExp<Real> part = lse[split * rows];
    const Real above = part.high - OnlineSoftmax<Real>::finite_or_zero(max);
    const Real weight = exponential<Real>(above + part.low);
    weights[warp][split] = weight;
    sum += weight;
  }
  const OnlineSoftmax<Real> joined{max, warp_sum(sum)};
  const Real inverse_sum = joined.inverse_sum();
  __syncwarp();
  const auto out = a.outputs.out.as<Element>(), out_low = a.outputs.out_low.as<Element>();
  const Real* const partial = static_cast<const Real*>(a.partial_out) + index * p.head_dim_v;
  for (int column = threadIdx.x; column < p.head_dim_v; column += 32 * kJoinWarps) {
    Real value = 0;
#pragma unroll 16
    for (int split = 0; split < a.splits.value(); ++split) {
      const Real weight = weights[warp][split];
      const Real term = partial[split * rows * p.head_dim_v + column];
      value += weight != 0 ? weight * term : Real(0);
    }
    value *= inverse_sum;
    *out.at(batch, head, row, column) = convert<Element>(value);
    if (out_low) {
      *out_low.at(batch, head, row, column) = convert<Element>(rounding_error<Element>(value));
    }
  }
  if (threadIdx.x == 0) {
    const LogSumExp<Real> whole = joined.log_sum_exp();
    *a.outputs.lse.as<Real>().at(batch, head, row) = whole.high;
    const auto lse_low = a.outputs.lse_low.as<Real>();
    if (lse_low) *lse_low.at(batch, head, row) = whole.low;
  }
}

}  // namespace flashattn::cuda::portable
