// From dot products to scores, in the order of the formula, for one row.
#pragma once

#include "core/softmax_gradient.h"
#include "cuda/naive/row.cuh"

namespace flashattn::cuda::naive {

template <class Element>
class ScoreTerms {
  using Real = Accumulator<Element>;

 public:
  __device__ ScoreTerms(const AttentionProblem& p, const RowPlace& place)
      : place_(place),
        scale_(static_cast<Real>(p.scale)),
        softcap_{static_cast<Real>(p.softcap)},
        dtype_(p.attn_mask.dtype) {
    if (p.attn_mask) {
      const UntypedView4& view = p.attn_mask.view;
      attn_mask_ = view.data;
      const int64_t index[] = {place.batch, place.head, place.row};
      for (int d = 0; d < 3; ++d) mask_offset_ += view.size[d] > 1 ? index[d] * view.stride[d] : 0;
      mask_stride_ = view.size[3] > 1 ? view.stride[3] : 0;
    }
    has_alibi_ = static_cast<bool>(p.alibi_slopes);
    if (has_alibi_) slope_ = *p.alibi_slopes.as<const Real>().at(place.batch, place.head);
  }

  // Dot products of a chunk become scores; hidden ones -inf.
  __device__ void apply(int64_t first, Real (&x)[kChunk]) const {
    const int begin = place_.begin_in(first), end = place_.end_in(first);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = softcap_(x[i] * scale_);
    if (attn_mask_) {
      Real mask[kChunk];
      if (dtype_ == DType::boolean) {
        load_mask<bool>(first, begin, end, mask);
      } else if (dtype_ == kDType<Element>) {
        load_mask<Element>(first, begin, end, mask);
      } else {
        load_mask<float>(first, begin, end, mask);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        x[i] = mask[i] == kNegativeInfinity<Real> ? mask[i] : x[i] + mask[i];
      }
    }
    if (has_alibi_) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] += slope_ * distance(first + i);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < begin || i >= end) x[i] = kNegativeInfinity<Real>;
    }
  }

  // d score / d slope.
  __device__ Real distance(int64_t column) const {
    return alibi_distance<Real>(place_.row, place_.shift, column);
  }
  // d score / d dot product, from the dot product.
  __device__ Real slope_at(Real dot) const {
    return scale_ * softcap_.slope_at(softcap_(dot * scale_));
  }
  __device__ Real scale() const { return scale_; }

 private:
  // Columns [begin, end) of a chunk of the mask, as something to add.
  template <class Mask>
  __device__ void load_mask(int64_t first, int begin, int end, Real (&values)[kChunk]) const {
    const Mask* mask = static_cast<const Mask*>(attn_mask_) + mask_offset_ + first * mask_stride_;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] = 0;
      if (i < begin || i >= end) continue;
      const Mask element = mask[i * mask_stride_];
      if constexpr (sizeof(Mask) == 1) {
        values[i] = element ? Real(0) : kNegativeInfinity<Real>;
      } else {
        values[i] = convert<Real>(element);
      }
    }
  }

  const RowPlace& place_;
  Real scale_;
  Softcap<Real> softcap_;
  DType dtype_;
  const void* attn_mask_ = nullptr;
  int64_t mask_offset_ = 0, mask_stride_ = 0;
  bool has_alibi_ = false;
  Real slope_ = 0;
};

}  // namespace flashattn::cuda::naive
