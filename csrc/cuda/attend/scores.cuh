// core/ applied to accumulator fragments: from dot products to scores, and dropout.
//
// Fragments are [8-column block][4], in the layout of tile/products.cuh.
#pragma once

#include <cstdint>

#include "core/online_softmax.h"
#include "core/problem.h"
#include "core/softmax_gradient.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashattn::cuda {

template <class Real>
inline constexpr Real kLog2E = Real(1.4426950408889634);

__device__ __forceinline__ float power_of_two(float x) { return ptx::exp2_approximate(x); }
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

// Positions inside a sequence are 32-bit in kernels; where rows lie in memory is 64-bit.
using TileRange = RangeOf<int>;
using TileMask = SequenceMaskOf<int>;

// Where a thread's fragment lies: which query row and key an element belongs to. Query rows run
// along the fragment's rows ...
struct RowPosition {
  int row;  // of elements 0 and 1; elements 2 and 3: row + 8
  int key;  // of element 0 of block 0: the fragment's first key + 2 * (lane % 4)

  __device__ int row_of(int, int element) const { return row + (element / 2) * 8; }
  __device__ int key_of(int block, int element) const { return key + block * 8 + element % 2; }
  // What the fragment row `half` sees, as columns of the fragment.
  __device__ TileRange seen(const TileMask& mask, int half) const {
    const TileRange keys = mask.keys_for({row + 8 * half, row + 8 * half + 1});
    return {keys.begin - key, keys.end - key};
  }
};

// ... or, where a product was made transposed, keys do.
struct KeyPosition {
  int key;  // of elements 0 and 1; elements 2 and 3: key + 8
  int row;  // of element 0 of block 0: the fragment's first row + 2 * (lane % 4)

  __device__ int row_of(int block, int element) const { return row + block * 8 + element % 2; }
  __device__ int key_of(int, int element) const { return key + (element / 2) * 8; }
  __device__ TileRange seen(const TileMask& mask, int half) const {
    if (key + 8 * half >= mask.len_k) return {0, 0};
    const TileRange rows = mask.queries_for({key + 8 * half, key + 8 * half + 1});
    return {rows.begin - row, rows.end - row};
  }
};

// Hides what causality, the window and the sequence's ends hide.
template <class Real, int Blocks, class Position>
__device__ __forceinline__ void hide(Real (&scores)[Blocks][4], const Position& at,
                                     const TileMask& mask) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TileRange seen = at.seen(mask, half);
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = b * 8 + e;
        if (column < seen.begin || column >= seen.end) {
          scores[b][2 * half + e] = kNegativeInfinity<Real>;
        }
      }
    }
  }
}

// The terms that attn_mask adds to a tile of scores, staged in shared memory by the whole block
// (bias.cuh): both orientations find them there.
template <class Tile>
struct BiasView {
  using Real = typename Tile::Element;
  const Tile& terms;
  int row, key;  // of the tile's first element

  // The terms of elements 2 * half and 2 * half + 1 of a block: neighbours along keys ...
  __device__ __forceinline__ void load(Real (&to)[2], const RowPosition& at, int block,
                                       int half) const {
    struct alignas(2 * sizeof(Real)) Pair {
      Real value[2];
    };
    const Pair pair = *reinterpret_cast<const Pair*>(
        terms.at(at.row_of(block, 2 * half) - row, at.key_of(block, 2 * half) - key));
    to[0] = pair.value[0];
    to[1] = pair.value[1];
  }
  // ... or along rows.
  __device__ __forceinline__ void load(Real (&to)[2], const KeyPosition& at, int block,
                                       int half) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      to[e] = *terms.at(at.row_of(block, 2 * half + e) - row, at.key_of(block, 2 * half) - key);
    }
  }
};
struct NoTile {};
template <class Element, int Rows, int Keys>
class MaskTile;  // mask_tile.cuh

// Whether scores are a positive multiple of the dot product, with dropout or without, have
// attn_mask added, or have other terms too.
enum class ScoreKind { plain, dropped, masked, general };

// Scores of a call without dropout and sinks, with few of the formula's terms.
struct FewTerms {
  static constexpr bool kGeneral = false, kMasked = false, kDropout = false;

  __device__ static bool drops(const AttentionProblem&) { return false; }
  __device__ static float initial_max(const AttentionProblem&, int) {
    return kNegativeInfinity<float>;
  }
};

// Scores are dot products times a positive scale, which the exponential applies: nothing to do.
// References are in units of log2, so a score's distance from one is a single multiply-add. What
// rounding scale * log2(e) lost is made good where a row's lse is made, since the scores that count
// are close to it.
//
// From kCoarse on a reference is too coarse: the probability of the largest score would no longer
// round to 1. Such a row is measured from a score itself, its base, which is subtracted from the
// scores before anything else (softmax_step.cuh).
struct PlainScores : FewTerms {
  using Real = float;
  static constexpr float kCoarse = 1 << 13;
  template <int Rows, int Keys>
  using Bias = NoTile;
  float scale, scale_log2;

  __device__ explicit PlainScores(const AttentionProblem& p)
      : scale(static_cast<float>(p.scale)), scale_log2(scale * kLog2E<float>) {}
  __device__ PlainScores(const AttentionProblem& p, int, int, const TileMask&) : PlainScores(p) {}

  __device__ float reference_for(float max) const { return max * scale_log2; }
  // By how many powers of two a maximum exceeds a reference.
  __device__ float excess(float max, float reference) const {
    return fmaf(max, scale_log2, -reference);
  }
  __device__ float rescale(float from, float to) const { return power_of_two(from - to); }
  __device__ float exponential(float score, float reference) const {
    return power_of_two(fmaf(score, scale_log2, -reference));
  }
  __device__ bool is_coarse(float max) const { return fabsf(max * scale_log2) >= kCoarse; }
  __device__ LogSumExp<float> natural_of_base(float base) const {
    const float high = base * scale;
    return {high, fmaf(base, scale, -high)};
  }
  __device__ LogSumExp<float> natural(float reference) const {
    constexpr float kLn2 = 0.693147182f, kLn2Low = -1.90465421e-9f;
    const float high = reference * kLn2;
    const float low = fmaf(reference, kLn2, -high) + reference * kLn2Low;
    return {high, fmaf(high, lost_of_scale(), low)};
  }

  // The distance from lse is taken in natural units: whatever their size, it is rounded once.
  __device__ LogSumExp<float> split(LogSumExp<float> lse) const {
    return {lse.high, lse.low * kLog2E<float>};
  }
  __device__ float probability(float score, LogSumExp<float> lse) const {
    return power_of_two(fmaf(fmaf(score, scale, -lse.high), kLog2E<float>, -lse.low));
  }

 private:
  // What rounding scale_log2 lost, as a share of it.
  __device__ float lost_of_scale() const {
    constexpr float kLow = 1.92596299e-8f;  // of log2(e), beyond its rounding to float
    return fmaf(scale, kLow, fmaf(scale, kLog2E<float>, -scale_log2)) / scale_log2;
  }
};

// Plain scores of fp32 queries and keys, which may be of any size: distances come first, and are
// scaled then.
struct PlainFp32Scores : FewTerms {
  using Real = float;
  template <int Rows, int Keys>
  using Bias = NoTile;
  float scale, scale_log2;

  __device__ explicit PlainFp32Scores(const AttentionProblem& p)
      : scale(static_cast<float>(p.scale)), scale_log2(scale * kLog2E<float>) {}
  __device__ PlainFp32Scores(const AttentionProblem& p, int, int, const TileMask&)
      : PlainFp32Scores(p) {}

  __device__ float reference_for(float max) const { return max; }
  __device__ float excess(float max, float reference) const {
    return (max - reference) * scale_log2;
  }
  __device__ float rescale(float from, float to) const { return exponential(from, to); }
  __device__ float exponential(float score, float reference) const {
    return power_of_two((score - reference) * scale_log2);
  }
  __device__ LogSumExp<float> natural(float reference) const {
    const float high = reference * scale;
    return {high, fmaf(reference, scale, -high)};
  }
  __device__ LogSumExp<float> split(LogSumExp<float> lse) const { return lse; }
  __device__ float probability(float score, LogSumExp<float> lse) const {
    return power_of_two((fmaf(score, scale, -lse.high) - lse.low) * kLog2E<float>);
  }
};

// Plain scores of a call with dropout.
struct DroppedPlainScores : PlainScores {
  static constexpr bool kDropout = true;
  using PlainScores::PlainScores;
  __device__ static bool drops(const AttentionProblem&) { return true; }
};

// Scores that other terms are added to are in natural units.
template <class Real_>
struct NaturalScores {
  using Real = Real_;
  Real scale;

  __device__ explicit NaturalScores(const AttentionProblem& p)
      : scale(static_cast<Real>(p.scale)) {}

  // The subtraction comes first: a score of finfo.min times log2(e) would overflow.
  __device__ Real reference_for(Real max) const { return max; }
  __device__ Real excess(Real max, Real reference) const {
    return (max - reference) * kLog2E<Real>;
  }
  __device__ Real rescale(Real from, Real to) const { return exponential(from, to); }
  __device__ Real exponential(Real score, Real reference) const {
    return power_of_two((score - reference) * kLog2E<Real>);
  }
  __device__ LogSumExp<Real> natural(Real reference) const { return {reference, 0}; }
  __device__ LogSumExp<Real> split(LogSumExp<Real> lse) const { return lse; }
  __device__ Real probability(Real score, LogSumExp<Real> lse) const {
    return power_of_two(((score - lse.high) - lse.low) * kLog2E<Real>);
  }
};

// Dot products with attn_mask, which is bool or of the operands' dtype, and no other term.
template <class Element>
struct MaskedScores : NaturalScores<float>, FewTerms {
  static constexpr bool kMasked = true;
  template <int Rows, int Keys>
  using Bias = MaskTile<Element, Rows, Keys>;

  __device__ MaskedScores(const AttentionProblem& p, int, int, const TileMask&)
      : NaturalScores(p) {}
};

// Every term of the formula, in its order.
template <class Real_>
class GeneralScores : public NaturalScores<Real_> {
 public:
  using Real = Real_;
  using NaturalScores<Real>::scale;
  static constexpr bool kGeneral = true, kMasked = false, kDropout = true;
  template <int Rows, int Keys>
  using Bias = SharedTile<Real, Rows, Keys>;

  __device__ explicit GeneralScores(const AttentionProblem& p)
      : NaturalScores<Real>(p), softcap_{static_cast<Real>(p.softcap)} {}
  __device__ GeneralScores(const AttentionProblem& p, int batch, int head, const TileMask& mask)
      : NaturalScores<Real>(p),
        softcap_{static_cast<Real>(p.softcap)},
        shift_(mask.shift),
        has_bias_(p.attn_mask),
        has_alibi_(p.alibi_slopes) {
    if (has_alibi_) slope_ = *p.alibi_slopes.as<const Real>().at(batch, head);
  }

  __device__ static bool drops(const AttentionProblem& p) { return static_cast<bool>(p.dropout); }

  // A sink starts the running maximum.
  __device__ static Real initial_max(const AttentionProblem& p, int head) {
    return p.sinks ? *p.sinks.as<const Real>().at(0, head) : kNegativeInfinity<Real>;
  }

  // From dot products to scores. `on_slope(block, element, slope)` gets d (capped score) / d
  // (scaled dot product) where that is not 1.
  template <int Blocks, class Position, class Bias, class OnSlope>
  __device__ __forceinline__ void apply(Real (&scores)[Blocks][4], const Position& at,
                                        const Bias& bias, const OnSlope& on_slope) const {
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[b][e] *= scale;
    }
    if (softcap_.cap > 0) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[b][e] = softcap_(scores[b][e]);
          on_slope(b, e, softcap_.slope_at(scores[b][e]));
        }
      }
    }
    if (has_bias_) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Real terms[2];
          bias.load(terms, at, b, half);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            Real& score = scores[b][2 * half + e];
            score = terms[e] == kNegativeInfinity<Real> ? terms[e] : score + terms[e];
          }
        }
      }
    }
    if (has_alibi_) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[b][e] += slope_ * alibi_distance<Real>(at.row_of(b, e), shift_, at.key_of(b, e));
        }
      }
    }
  }

 private:
  Softcap<Real> softcap_;
  int shift_ = 0;
  bool has_bias_ = false, has_alibi_ = false;
  Real slope_ = 0;
};

}  // namespace flashattn::cuda
