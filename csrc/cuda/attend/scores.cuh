// core/ applied to accumulator fragments: from dot products to scores, and dropout.
//
// Fragments are [8-column block][4], in the layout of tile/products.cuh.
#pragma once

#include <cstdint>

#include "core/online_softmax.h"
#include "core/problem.h"
#include "core/softmax_gradient.h"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

template <class Real>
inline constexpr Real kLog2E = Real(1.4426950408889634);

__device__ __forceinline__ float power_of_two(float x) { return ptx::exp2_approximate(x); }
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

// Where a thread's fragment lies: which query row and key (positions inside the sequence) an
// element belongs to. Query rows run along the fragment's rows ...
struct RowPosition {
  int64_t row;  // of elements 0 and 1; elements 2 and 3: row + 8
  int64_t key;  // of element 0 of block 0: the tile's first key + 2 * (lane % 4)

  __device__ int64_t row_of(int, int element) const { return row + (element / 2) * 8; }
  __device__ int64_t key_of(int block, int element) const { return key + block * 8 + element % 2; }
};

// ... or, where a product was made transposed, keys do.
struct KeyPosition {
  int64_t key;  // of elements 0 and 1; elements 2 and 3: key + 8
  int64_t row;  // of element 0 of block 0: the tile's first row + 2 * (lane % 4)

  __device__ int64_t row_of(int block, int element) const { return row + block * 8 + element % 2; }
  __device__ int64_t key_of(int, int element) const { return key + (element / 2) * 8; }
};

// Hides what causality, the window and the sequence's ends hide: positions outside `seen`, relative
// to the thread's first column of the fragment row `half`.
template <class Real, int Blocks>
__device__ __forceinline__ void hide_outside(Real (&scores)[Blocks][4], int half, Range seen,
                                             int64_t first_column) {
  // Clamped so that 32 bits suffice.
  const auto relative = [&](int64_t position) {
    const int64_t distance = position - first_column;
    return static_cast<int>(distance < 0 ? 0 : distance > Blocks * 8 ? Blocks * 8 : distance);
  };
  const int begin = relative(seen.begin), end = relative(seen.end);
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = b * 8 + e;
      if (column < begin || column >= end) scores[b][2 * half + e] = kNegativeInfinity<Real>;
    }
  }
}

template <class Real, int Blocks>
__device__ __forceinline__ void hide(Real (&scores)[Blocks][4], const RowPosition& at,
                                     const SequenceMask& mask) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.row + 8 * half;
    hide_outside(scores, half, mask.keys_for({row, row + 1}), at.key);
  }
}

template <class Real, int Blocks>
__device__ __forceinline__ void hide(Real (&scores)[Blocks][4], const KeyPosition& at,
                                     const SequenceMask& mask) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = at.key + 8 * half;
    const Range seen = key < mask.len_k ? mask.queries_for({key, key + 1}) : Range{0, 0};
    hide_outside(scores, half, seen, at.row);
  }
}

// Scores are dot products times a positive scale, which the exponential applies: nothing to do.
template <class Real_>
struct PlainScores {
  using Real = Real_;
  static constexpr bool kGeneral = false;
  Real scale, scale_log2;

  __device__ PlainScores(const AttentionProblem& p, int64_t, int64_t, const SequenceMask&)
      : scale(static_cast<Real>(p.scale)), scale_log2(scale * kLog2E<Real>) {}

  __device__ static Real initial_max(const AttentionProblem&, int64_t) {
    return kNegativeInfinity<Real>;
  }
  template <int Blocks, class Position>
  __device__ void apply(Real (&)[Blocks][4], const Position&) const {}
  // d score / d dot product, from the dot product.
  __device__ Real slope_at(Real) const { return scale; }

  // exp(score - reference), and the difference in log2 units. Differences come before products with
  // log2(e): what those round grows with the score.
  __device__ Real exponential(Real score, Real reference) const {
    return power_of_two((score - reference) * scale_log2);
  }
  __device__ Real log2_difference(Real a, Real b) const { return (a - b) * scale_log2; }
  __device__ Real probability(Real score, Real lse, Real lse_low) const {
    return power_of_two((fma(score, scale, -lse) - lse_low) * kLog2E<Real>);
  }
  // A score in natural units, and what rounding that product lost.
  __device__ Real natural(Real score) const { return score * scale; }
  __device__ Real natural_low(Real score) const { return fma(score, scale, -(score * scale)); }
};

// Every term of the formula, in its order. Scores come out in natural units.
template <class Real_>
class GeneralScores {
 public:
  using Real = Real_;
  static constexpr bool kGeneral = true;

  __device__ GeneralScores(const AttentionProblem& p, int64_t batch, int64_t head,
                           const SequenceMask& mask)
      : scale_(static_cast<Real>(p.scale)),
        softcap_{static_cast<Real>(p.softcap)},
        shift_(mask.shift),
        len_q_(mask.len_q),
        len_k_(mask.len_k),
        dtype_(p.attn_mask.dtype) {
    if (p.attn_mask) {
      const UntypedView4& view = p.attn_mask.view;
      attn_mask_ = view.data;
      mask_offset_ = (view.size[0] > 1 ? batch * view.stride[0] : 0) +
                     (view.size[1] > 1 ? head * view.stride[1] : 0);
      mask_row_stride_ = view.size[2] > 1 ? view.stride[2] : 0;
      mask_column_stride_ = view.size[3] > 1 ? view.stride[3] : 0;
    }
    if (p.alibi_slopes) {
      has_alibi_ = true;
      slope_ = *p.alibi_slopes.as<const Real>().at(batch, head);
    }
  }

  // A sink starts the running maximum.
  __device__ static Real initial_max(const AttentionProblem& p, int64_t head) {
    return p.sinks ? *p.sinks.as<const Real>().at(0, head) : kNegativeInfinity<Real>;
  }

  // The subtraction comes first: a score of finfo.min times log2(e) would overflow.
  __device__ Real exponential(Real score, Real reference) const {
    return power_of_two((score - reference) * kLog2E<Real>);
  }
  __device__ Real log2_difference(Real a, Real b) const { return (a - b) * kLog2E<Real>; }
  __device__ Real probability(Real score, Real lse, Real lse_low) const {
    return power_of_two(((score - lse) - lse_low) * kLog2E<Real>);
  }
  __device__ Real natural(Real score) const { return score; }
  __device__ Real natural_low(Real) const { return 0; }

  template <int Blocks, class Position>
  __device__ void apply(Real (&scores)[Blocks][4], const Position& at) const {
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[b][e] = softcap_(scores[b][e] * scale_);
    }
    if (attn_mask_) add_attn_mask(scores, at);
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

  // d score / d dot product, from the dot product.
  __device__ Real slope_at(Real dot) const {
    return scale_ * softcap_.slope_at(softcap_(dot * scale_));
  }

 private:
  template <int Blocks, class Position>
  __device__ void add_attn_mask(Real (&scores)[Blocks][4], const Position& at) const {
    switch (dtype_) {
      case DType::boolean: return add_typed<bool>(scores, at);
      case DType::float16: return add_typed<float16>(scores, at);
      case DType::bfloat16: return add_typed<bfloat16>(scores, at);
      case DType::float32: return add_typed<float>(scores, at);
      case DType::float64: return add_typed<double>(scores, at);
    }
  }

  template <class Element, int Blocks, class Position>
  __device__ void add_typed(Real (&scores)[Blocks][4], const Position& at) const {
    const Element* mask = static_cast<const Element*>(attn_mask_) + mask_offset_;
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = at.row_of(b, e), key = at.key_of(b, e);
        if (row >= len_q_ || key >= len_k_) continue;
        const Element element = mask[row * mask_row_stride_ + key * mask_column_stride_];
        if constexpr (sizeof(Element) == 1) {
          if (!element) scores[b][e] = kNegativeInfinity<Real>;
        } else {
          const Real term = convert<Real>(element);
          scores[b][e] = term == kNegativeInfinity<Real> ? term : scores[b][e] + term;
        }
      }
    }
  }

  Real scale_;
  Softcap<Real> softcap_;
  int64_t shift_, len_q_, len_k_;
  const void* attn_mask_ = nullptr;
  DType dtype_;
  int64_t mask_offset_ = 0, mask_row_stride_ = 0, mask_column_stride_ = 0;
  bool has_alibi_ = false;
  Real slope_ = 0;
};

// Calls visit(block, element, kept) for every element of a fragment: one Philox call for eight.
// The tile's first key is a multiple of 32.
template <int Blocks, class Visit>
__device__ __forceinline__ void visit_dropout(const DropoutStream& stream, const RowPosition& at,
                                              const Visit& visit) {
  static_assert(Blocks % 4 == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int b = 0; b < Blocks; b += 4) {
      const DropoutNumbers numbers =
          stream.numbers(at.row + 8 * half, dropout_group(at.key + 8 * b));
#pragma unroll
      for (int slot = 0; slot < 8; ++slot) {
        visit(b + slot / 2, 2 * half + slot % 2, numbers.number(slot) < stream.threshold);
      }
    }
  }
}

// A transposed fragment has none of a call's eight elements together: one call each.
template <int Blocks, class Visit>
__device__ __forceinline__ void visit_dropout(const DropoutStream& stream, const KeyPosition& at,
                                              const Visit& visit) {
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) visit(b, e, stream.keep(at.row_of(b, e), at.key_of(b, e)));
  }
}

}  // namespace flashattn::cuda
