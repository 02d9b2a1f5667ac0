// The online softmax over accumulator fragments, with lazy rescaling: the reference that scores are
// measured from is raised only when a row has outgrown it by 2^8, since the final division makes
// any reference exact.
#pragma once

#include "core/online_softmax.h"
#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

// A value of each row is held by the four lanes of a quad.
template <class Real>
__device__ __forceinline__ Real larger(Real a, Real b) {
  return a > b ? a : b;
}
template <>
__device__ __forceinline__ float larger<float>(float a, float b) {
  return fmaxf(a, b);
}
template <class Real>
__device__ __forceinline__ Real quad_max(Real value) {
  value = larger(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return larger(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
template <class Real>
__device__ __forceinline__ Real quad_sum(Real value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The two rows of a 16-row fragment that a thread has a share of.
template <class Real>
struct SoftmaxRows {
  Real reference[2];  // in score units; the row's maximum so far, or at most 2^8 below it
  Real sum[2];        // this lane's share of the sum of exp(score - reference)

  // A row may start from a sink: a term of the sum without a value.
  __device__ void start(Real initial_max, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = initial_max;
      sum[half] = initial_max != kNegativeInfinity<Real> && lane % 4 == 0 ? Real(1) : 0.0f;
    }
  }

  // Turns scores into exp(score - reference) and adds them to the sums; rescales `out` where
  // needed.
  template <int Blocks, int OutBlocks, class Scores>
  __device__ __forceinline__ void step(Real (&scores)[Blocks][4], Real (&out)[OutBlocks][4],
                                       const Scores& terms) {
    constexpr Real kSlack = 8;
    Real factor[2] = {1, 1};
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Real max = scores[0][2 * half];
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
        max = larger(max, larger(scores[b][2 * half], scores[b][2 * half + 1]));
      }
      max = quad_max(max);
      // Also true for the first finite maximum, where the reference is -inf.
      if (terms.log2_difference(max, reference[half]) > kSlack) {
        factor[half] = power_of_two(terms.log2_difference(reference[half], max));
        reference[half] = max;
        sum[half] *= factor[half];
        raised = true;
      }
    }
    if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
      for (int b = 0; b < OutBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[b][e] *= factor[e / 2];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real subtract = OnlineSoftmax<Real>::finite_or_zero(reference[half]);
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[b][e] = terms.exponential(scores[b][e], subtract);
          sum[half] += scores[b][e];
        }
      }
    }
  }

  // The state of a row, in natural units, the same in all four lanes.
  template <class Scores>
  __device__ OnlineSoftmax<Real> finish(int half, const Scores& terms) const {
    return {terms.natural(reference[half]), quad_sum(sum[half])};
  }
};

}  // namespace flashattn::cuda
