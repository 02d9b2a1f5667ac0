// Scores from dot products, a row at a time in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/score_terms.h"
#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// One row of a tile of scores: (padded keys).
template <class Real>
class ScoreRow {
 public:
  // `row` holds the dot products of the row at `position` with the keys.
  ScoreRow(const ScoreTerms<Real>& terms, int64_t position, Range keys, Real* row)
      : terms_(terms), position_(position), keys_(keys), row_(row), seen_(visible()) {
    if (!seen_.empty()) {
      columns_ = {seen_.begin / kCount * kCount, round_up(seen_.end, kCount)};
    }
  }

  // The vectors that hold the row's visible keys. What lies outside is hidden and not touched.
  Range columns() const { return columns_; }

  struct Finished {
    Vector<Real> max;  // the largest score of each lane; NaN is passed over
    Real scale;        // what the row must still be multiplied by
  };

  // Makes scores of the dot products of columns(); hidden ones among them become -inf. `slopes`
  // receives d score / d (scale * dot); it may be null.
  Finished finish(Real* slopes) const {
    // Only a positive scale to apply: the largest score is the largest dot product, scaled, and
    // whoever reads the row next can scale it on the way.
    if (terms_.adds_nothing() && terms_.scale > Real(0) && !slopes) {
      if (terms_.attn_mask) hide_unmasked();
      hide();
      return {largest() * terms_.scale, terms_.scale};
    }
    for (int64_t c = columns_.begin; c < columns_.end; c += kCount) {
      store(row_ + c, load(row_ + c) * terms_.scale);
    }
    if (terms_.has_softcap()) apply_softcap();
    if (slopes) store_slopes(slopes);
    if (terms_.attn_mask) add_attn_mask();
    if (terms_.has_alibi) add_alibi();
    hide();
    return {largest(), Real(1)};
  }

 private:
  static constexpr int kCount = kLanes<Real>;

  // The visible columns, counted from the tile's first.
  Range visible() const {
    const Range seen = terms_.mask.keys_for({position_, position_ + 1}).overlap(keys_);
    return seen.empty() ? Range{0, 0} : seen.moved(-keys_.begin);
  }

  void hide() const {
    for (int64_t c = columns_.begin; c < seen_.begin; ++c) row_[c] = kNegativeInfinity<Real>;
    for (int64_t c = seen_.end; c < columns_.end; ++c) row_[c] = kNegativeInfinity<Real>;
  }

  // Four at a time, since each maximum waits for its last comparison.
  Vector<Real> largest() const {
    Vector<Real> max[4];
    for (auto& m : max) m = broadcast(kNegativeInfinity<Real>);
    int64_t c = columns_.begin;
    for (; c + 4 * kCount <= columns_.end; c += 4 * kCount) {
      for (int i = 0; i < 4; ++i) max[i] = larger(load(row_ + c + i * kCount), max[i]);
    }
    for (; c < columns_.end; c += kCount) max[0] = larger(load(row_ + c), max[0]);
    return larger(larger(max[0], max[1]), larger(max[2], max[3]));
  }

  void apply_softcap() const {
    for (int64_t c = seen_.begin; c < seen_.end; ++c) row_[c] = terms_.softcap(row_[c]);
  }
  void store_slopes(Real* slopes) const {
    for (int64_t c = columns_.begin; c < columns_.end; ++c)
      slopes[c] = terms_.softcap.slope_at(row_[c]);
  }

  void add_alibi() const {
    using Integer = std::conditional_t<sizeof(Real) == 8, int64_t, int32_t>;
    const int64_t diagonal = position_ + terms_.mask.shift - keys_.begin;
    for (int64_t c = columns_.begin; c < columns_.end; c += kCount) {
      const Vector<Integer> distance = lane_numbers<Integer>() + static_cast<Integer>(c - diagonal);
      const Vector<Integer> penalty = distance > 0 ? -distance : distance;
      store(row_ + c,
            load(row_ + c) + __builtin_convertvector(penalty, Vector<Real>) * terms_.alibi_slope);
    }
  }

  void add_attn_mask() const {
    switch (terms_.attn_mask_dtype) {
      case DType::boolean: return hide_unmasked();
      case DType::float16: return add_float_mask<float16>();
      case DType::bfloat16: return add_float_mask<bfloat16>();
      case DType::float32: return add_float_mask<float>();
      case DType::float64: return add_float_mask<double>();
    }
  }

  template <class Element>
  const Element* mask_row() const {
    return static_cast<const Element*>(terms_.attn_mask) + position_ * terms_.attn_mask_row_stride +
           keys_.begin * terms_.attn_mask_column_stride;
  }

  // A mask is read row by row, too few bytes of each for the processor to see what comes next.
  template <class Element>
  void ask_for_later_row(const Element* mask) const {
    constexpr int64_t kRowsAhead = 4;
    __builtin_prefetch(mask + kRowsAhead * terms_.attn_mask_row_stride);
  }

  void hide_unmasked() const {
    const bool* mask = mask_row<bool>();
    const int64_t stride = terms_.attn_mask_column_stride;
    for (int64_t c = columns_.begin; c < columns_.end; c += kCount) {
      const auto keep = load_flags<Real>(mask + c * stride, stride, keys_.size() - c);
      ask_for_later_row(mask + c * stride);
      store(row_ + c, keep ? load(row_ + c) : broadcast(kNegativeInfinity<Real>));
    }
  }

  // -inf hides even what is infinite or NaN.
  template <class Element>
  void add_float_mask() const {
    const Element* mask = mask_row<Element>();
    const int64_t stride = terms_.attn_mask_column_stride;
    if constexpr (std::is_same_v<Real, Accumulator<Element>>) {
      for (int64_t c = columns_.begin; c < columns_.end; c += kCount) {
        const Vector<Real> term = load_some<Real>(mask + c * stride, stride, keys_.size() - c);
        ask_for_later_row(mask + c * stride);
        const Vector<Real> score = load(row_ + c) + term;
        store(row_ + c, term == kNegativeInfinity<Real> ? term : score);
      }
    } else {
      for (int64_t c = seen_.begin; c < seen_.end; ++c) {
        const Real term = convert<Real>(mask[c * stride]);
        row_[c] = term == kNegativeInfinity<Real> ? term : row_[c] + term;
      }
    }
  }

  const ScoreTerms<Real>& terms_;
  const int64_t position_;
  const Range keys_;
  Real* const row_;
  const Range seen_;     // counted from the tile's first key
  Range columns_{0, 0};  // of whole vectors
};

}  // namespace
}  // namespace flashattn::cpu
