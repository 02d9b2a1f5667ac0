// The online softmax over accumulator fragments, with lazy rescaling: the reference that scores are
// measured from is raised only when a row has outgrown it by 2^8, since the final division makes
// any reference exact.
#pragma once

#include <type_traits>

#include "core/online_softmax.h"
#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

template <class Real>
__device__ __forceinline__ Real larger(Real a, Real b) {
  return a > b ? a : b;
}
template <>
__device__ __forceinline__ float larger<float>(float a, float b) {
  return fmaxf(a, b);
}
// A value of each row is held by the four lanes of a quad.
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

// The same of the lanes of a warp.
template <class Real>
__device__ __forceinline__ Real warp_max(Real value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}
template <class Real>
__device__ __forceinline__ Real warp_sum(Real value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The bases of a thread's coarse rows (PlainScores), -inf for the others. In shared memory, since
// hardly any row has one.
template <int Fragments, int Threads>
struct RowBases {
  float value[2 * Fragments][Threads];
  __device__ __forceinline__ float& of(int fragment, int half) {
    return value[2 * fragment + half][threadIdx.x];
  }
};
template <class Scores, int Fragments, int Threads>
using RowBasesOf = std::conditional_t<std::is_base_of_v<PlainScores, Scores>,
                                      RowBases<Fragments, Threads>, NoTile>;
template <class Bases>
inline constexpr bool kHasBases = !std::is_same_v<Bases, NoTile>;

// The two rows of a 16-row fragment that a thread has a share of. Units are those of the scores'
// references (scores.cuh).
template <class Real>
struct SoftmaxRows {
  static constexpr Real kSlack = 8;  // in powers of two

  Real reference[2];  // about the row's maximum so far, or at most 2^8 below it
  Real sum[2];        // this lane's share of the sum of exp(score - reference)

  // A row may start from a sink: a term of the sum without a value.
  __device__ void start(Real initial_max, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = initial_max;
      sum[half] = initial_max != kNegativeInfinity<Real> && lane % 4 == 0 ? Real(1) : Real(0);
    }
  }

  // Whether either row's maximum exceeds its reference by more than the slack; `max` becomes the
  // rows' maxima over these scores.
  template <int Blocks, class Scores>
  __device__ __forceinline__ bool outgrown(Real (&max)[2], const Real (&scores)[Blocks][4],
                                           const Scores& terms) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = larger(scores[0][2 * half], scores[0][2 * half + 1]);
#pragma unroll
      for (int b = 1; b < Blocks; ++b) {
        max[half] = larger(max[half], larger(scores[b][2 * half], scores[b][2 * half + 1]));
      }
      max[half] = quad_max(max[half]);
    }
    // Also true for the first finite maximum, where the reference is -inf.
    return terms.excess(max[0], reference[0]) > kSlack ||
           terms.excess(max[1], reference[1]) > kSlack;
  }

  // Measures from the new maxima where they exceed the slack. A row with a base keeps a reference
  // of -inf, so that it comes here with every tile.
  template <int Blocks, int OutBlocks, class Scores, class Bases>
  __device__ __forceinline__ void raise(const Real (&max)[2], Real (&scores)[Blocks][4],
                                        Real (&out)[OutBlocks][4], const Scores& terms,
                                        Bases& bases, int fragment) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool grown = terms.excess(max[half], reference[half]) > kSlack;
      Real raised = grown ? terms.reference_for(max[half]) : reference[half];
      Real factor = grown ? terms.rescale(reference[half], raised) : Real(1);
      if constexpr (kHasBases<Bases>) {
        const bool fresh = reference[half] == kNegativeInfinity<Real>;
        Real& stored = bases.of(fragment, half);
        if (grown && (terms.is_coarse(max[half]) || (fresh && stored != kNegativeInfinity<Real>))) {
          const Real base = larger(stored, max[half]);
          factor = fresh ? terms.exponential(stored - base, Real(0))  // 0 where there was no base
                         : power_of_two(-terms.excess(base, reference[half]));
          stored = base;
          raised = kNegativeInfinity<Real>;
#pragma unroll
          for (int b = 0; b < Blocks; ++b) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) scores[b][e] -= base;
          }
        }
      }
      reference[half] = raised;
      sum[half] *= factor;
#pragma unroll
      for (int b = 0; b < OutBlocks; ++b) {
        out[b][2 * half] *= factor;
        out[b][2 * half + 1] *= factor;
      }
    }
  }

  // Turns scores into exp(score - reference) and adds them to the sums.
  template <int Blocks, class Scores>
  __device__ __forceinline__ void exponentials(Real (&scores)[Blocks][4], const Scores& terms) {
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

  // The sum of a row, the same in all four lanes.
  __device__ Real total(int half) const { return quad_sum(sum[half]); }

  // lse of the row, from its total.
  template <class Scores, class Bases>
  __device__ LogSumExp<Real> log_sum_exp(int half, Real total, const Scores& terms, Bases& bases,
                                         int fragment) const {
    if (total == Real(0)) return {kNegativeInfinity<Real>, Real(0)};
    LogSumExp<Real> natural = terms.natural(reference[half]);
    if constexpr (kHasBases<Bases>) {
      if (reference[half] == kNegativeInfinity<Real>) {
        natural = terms.natural_of_base(bases.of(fragment, half));
      }
    }
    LogSumExp<Real> lse = OnlineSoftmax<Real>{natural.high, total}.log_sum_exp();
    lse.low += natural.low;
    return lse;
  }
};

// One step of a warp's rows, which all rescale together: a branch that is seldom taken.
template <int Fragments, int Blocks, int OutBlocks, class Real, class Scores, class Bases>
__device__ __forceinline__ void softmax_step(SoftmaxRows<Real> (&rows)[Fragments],
                                             Real (&scores)[Fragments][Blocks][4],
                                             Real (&out)[Fragments][OutBlocks][4],
                                             const Scores& terms, Bases& bases) {
  Real max[Fragments][2];
  bool outgrown = false;
#pragma unroll
  for (int f = 0; f < Fragments; ++f) {
    outgrown = rows[f].outgrown(max[f], scores[f], terms) || outgrown;
  }
  if (__any_sync(0xffffffffu, outgrown)) {
#pragma unroll
    for (int f = 0; f < Fragments; ++f) rows[f].raise(max[f], scores[f], out[f], terms, bases, f);
  }
#pragma unroll
  for (int f = 0; f < Fragments; ++f) rows[f].exponentials(scores[f], terms);
}

}  // namespace flashattn::cuda
