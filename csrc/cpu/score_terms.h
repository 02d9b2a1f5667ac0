// From dot products to scores: everything that the attention formula does between query * key and
// the softmax, for the pairs of one (sequence, head). Forward, backward and the naive kernels share
// it, so they cannot disagree.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/constants.h"
#include "core/problem.h"
#include "core/softmax_gradient.h"

namespace flashattn::cpu {

template <class Real>
class ScoreTerms {
 public:
  ScoreTerms(const AttentionProblem& problem, int64_t batch, int64_t head, const SequenceMask& mask)
      : mask_(mask),
        scale_(static_cast<Real>(problem.scale)),
        softcap_{static_cast<Real>(problem.softcap)},
        attn_mask_(problem.attn_mask) {
    if (attn_mask_) {
      const UntypedView4& view = attn_mask_.view;
      mask_offset_ = (view.size[0] > 1 ? batch * view.stride[0] : 0) +
                     (view.size[1] > 1 ? head * view.stride[1] : 0);
      mask_row_stride_ = view.size[2] > 1 ? view.stride[2] : 0;
      mask_column_stride_ = view.size[3] > 1 ? view.stride[3] : 0;
    }
    if (problem.alibi_slopes) {
      has_alibi_ = true;
      alibi_slope_ = *problem.alibi_slopes.as<const Real>().at(batch, head);
    }
  }

  const SequenceMask& mask() const { return mask_; }
  bool has_softcap() const { return softcap_.cap > Real(0); }

  // tile (rows, keys), row stride `stride`: dot products become scores, hidden ones -inf. `slopes`,
  // of the same shape, receives d score / d dot; it may be null.
  void apply(Range rows, Range keys, Real* tile, int64_t stride, Real* slopes = nullptr) const {
    const int64_t count = keys.size();
    const bool masked = !mask_.all_visible(rows, keys);
    for (int64_t i = rows.begin; i < rows.end; ++i, tile += stride) {
      for (int64_t c = 0; c < count; ++c) tile[c] *= scale_;
      if (has_softcap()) {
        for (int64_t c = 0; c < count; ++c) tile[c] = softcap_(tile[c]);
      }
      if (slopes) {
        for (int64_t c = 0; c < count; ++c) slopes[c] = scale_ * softcap_.slope_at(tile[c]);
        slopes += stride;
      }
      if (attn_mask_) add_attn_mask(i, keys, tile);
      if (has_alibi_) {
        for (int64_t c = 0; c < count; ++c) {
          tile[c] += alibi_slope_ * alibi_distance<Real>(i, mask_.shift, keys.begin + c);
        }
      }
      if (masked) hide(i, keys, tile);
    }
  }

 private:
  void add_attn_mask(int64_t row, Range keys, Real* scores) const {
    switch (attn_mask_.dtype) {
      case DType::boolean: return add_mask_row<bool>(row, keys, scores);
      case DType::float16: return add_mask_row<float16>(row, keys, scores);
      case DType::bfloat16: return add_mask_row<bfloat16>(row, keys, scores);
      case DType::float32: return add_mask_row<float>(row, keys, scores);
      case DType::float64: return add_mask_row<double>(row, keys, scores);
    }
  }

  template <class Element>
  void add_mask_row(int64_t row, Range keys, Real* scores) const {
    const Element* mask = static_cast<const Element*>(attn_mask_.view.data) + mask_offset_ +
                          row * mask_row_stride_ + keys.begin * mask_column_stride_;
    for (int64_t c = 0; c < keys.size(); ++c) {
      const Element element = mask[c * mask_column_stride_];
      if constexpr (std::is_same_v<Element, bool>) {
        scores[c] = element ? scores[c] : kNegativeInfinity<Real>;
      } else {
        const Real term = convert<Real>(element);
        scores[c] = term == kNegativeInfinity<Real> ? term : scores[c] + term;
      }
    }
  }

  void hide(int64_t row, Range keys, Real* scores) const {
    const Range seen = mask_.keys_for({row, row + 1});
    const int64_t begin = std::clamp(seen.begin, keys.begin, keys.end) - keys.begin;
    const int64_t end = std::clamp(seen.end, keys.begin, keys.end) - keys.begin;
    std::fill(scores, scores + begin, kNegativeInfinity<Real>);
    std::fill(scores + std::max(begin, end), scores + keys.size(), kNegativeInfinity<Real>);
  }

  SequenceMask mask_;
  Real scale_;
  Softcap<Real> softcap_;
  MaskTensor attn_mask_;
  int64_t mask_offset_ = 0, mask_row_stride_ = 0, mask_column_stride_ = 0;
  bool has_alibi_ = false;
  Real alibi_slope_ = 0;
};

// What dropout multiplies the probabilities of one row by: 0, or 1 / keep_rate.
template <class Real>
void dropout_factors(const DropoutStream& stream, int64_t row, Range keys, Real keep_scale,
                     Real* factors) {
  for (int64_t block = keys.begin / kDropoutBlock; block * kDropoutBlock < keys.end; ++block) {
    const DropoutBlock decisions = dropout_block(stream, row, block);
    const int64_t first = block * kDropoutBlock;
    const int64_t end = std::min(first + kDropoutBlock, keys.end);
    for (int64_t col = std::max(first, keys.begin); col < end; ++col) {
      factors[col - keys.begin] = decisions.keep[col - first] ? keep_scale : Real(0);
    }
  }
}

}  // namespace flashattn::cpu
