// What happens to a tile of scores between two products, forward and backward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/microkernels.h"
#include "cpu/vector/exponential.h"
#include "cpu/vector/pack.h"
#include "cpu/vector/scores.h"

namespace flashattn::cpu {
namespace {

template <class Real>
void fill(Real* row, int64_t begin, int64_t end, Real value) {
  for (int64_t c = begin; c < end; ++c) row[c] = value;
}

template <class Real>
void score_tile(const ScoreTerms<Real>& terms, Range rows, Range keys, Real* tile, int64_t stride,
                Real* slopes) {
  const int64_t columns = padded_columns(keys.size());
  for (int64_t i = rows.begin; i < rows.end; ++i, tile += stride) {
    const ScoreRow<Real> row(terms, i, keys, tile);
    const Range seen = row.columns();
    const Real scale = row.finish(slopes).scale;
    for (int64_t c = seen.begin; c < seen.end; ++c) tile[c] *= scale;
    fill(tile, 0, seen.begin, kNegativeInfinity<Real>);
    fill(tile, seen.end, columns, kNegativeInfinity<Real>);
    if (!slopes) continue;
    fill(slopes, 0, seen.begin, Real(0));
    fill(slopes, seen.end, columns, Real(0));
    slopes += stride;
  }
}

// weights = exp(scores * scale - subtract) * keep_factors, one vector at a time; sums the rest. Not
// by a fused multiply-add: the largest score's weight is exactly 1.
template <class Real>
struct WeightsOfRow {
  const Real* scores;
  Real scale, subtract;
  const Real* keep_factors;  // may be null
  Vector<Real> sum{};        // before dropout

  Vector<Real> next(int64_t column) {
    const Vector<Real> p = exponential_below_infinity(load(scores + column) * scale - subtract);
    sum += p;
    return keep_factors ? p * load(keep_factors + column) : p;
  }

  // Weights are 0 outside `seen`, up to `columns`; `low` receives what rounding lost of them.
  void store_all(Real* weights, Real* /*low*/, Range seen, int64_t columns) {
    fill(weights, 0, seen.begin, Real(0));
    for (int64_t c = seen.begin; c < seen.end; c += kLanes<Real>) store(weights + c, next(c));
    fill(weights, seen.end, columns, Real(0));
  }

  void store_all(bfloat16* weights, bfloat16* low, Range seen, int64_t columns) {
    constexpr int kCount = kLanes<float>;
    int64_t c = seen.begin;
    for (; c + 2 * kCount <= seen.end; c += 2 * kCount) {
      const Vector<float> first = next(c), second = next(c + kCount);
      store_pairs(weights + c, low ? low + c : nullptr, first, second);
    }
    if (c < seen.end) {
      store_pairs(weights + c, low ? low + c : nullptr, next(c), Vector<float>{});
      c += 2 * kCount;
    }
    for (bfloat16* row : {weights, low}) {
      if (!row) continue;
      fill(row, 0, seen.begin, bfloat16{0});
      fill(row, c, padded_depth<bfloat16>(columns), bfloat16{0});
    }
  }

 private:
  static void store_pairs(bfloat16* weights, bfloat16* low, Vector<float> first,
                          Vector<float> second) {
    const PairWords pairs = to_bfloat_pairs(first, second);
    std::memcpy(weights, &pairs, sizeof(pairs));
    if (!low) return;
    const PairWords lost = to_bfloat_pairs(first - load_elements(weights),
                                           second - load_elements(weights + kLanes<float>));
    std::memcpy(low, &lost, sizeof(lost));
  }
};

// The online softmax of a few rows side by side, one a lane: no row waits for another's maximum.
template <class Real>
struct SoftmaxLanes {
  static constexpr int kCount = kLanes<Real>;
  Real max[kCount], sum[kCount], factor[kCount];

  SoftmaxLanes(const OnlineSoftmax<Real>* states, int64_t rows, Vector<Real> candidates) {
    for (int64_t r = 0; r < kCount; ++r) {
      const OnlineSoftmax<Real> state = r < rows ? states[r] : OnlineSoftmax<Real>{};
      max[r] = state.max;
      sum[r] = state.sum;
    }
    const Vector<Real> old_max = load(max), new_max = larger(candidates, old_max);
    const Vector<Real> factors = exponential(old_max - finite_or_zero(new_max));
    store(factor, new_max == old_max ? broadcast(Real(1)) : factors);
    store(max, new_max);
    store(sum, load(sum) * load(factor));
    store(subtract_, finite_or_zero(new_max));
  }

  Real subtract(int64_t row) const { return subtract_[row]; }
  OnlineSoftmax<Real> state(int64_t row) const { return {max[row], sum[row]}; }

 private:
  // OnlineSoftmax::finite_or_zero.
  static Vector<Real> finite_or_zero(Vector<Real> max) {
    return max == kNegativeInfinity<Real> ? Vector<Real>{} : max;
  }
  Real subtract_[kCount];
};

template <class Real, class Operand>
Real softmax_step(const SoftmaxStep<Real, Operand>& s) {
  constexpr int kCount = kLanes<Real>;
  const int64_t columns = padded_columns(s.keys.size());
  Vector<Real> tile_max = broadcast(kNegativeInfinity<Real>);
  for (int64_t first = 0; first < s.rows.size(); first += kCount) {
    const int64_t rows = std::min<int64_t>(kCount, s.rows.size() - first);
    Vector<Real> maxima[kCount], sums[kCount] = {};
    Real scales[kCount];
    Range seen[kCount];
    for (int64_t r = rows; r < kCount; ++r) maxima[r] = broadcast(kNegativeInfinity<Real>);
    for (int64_t r = 0; r < rows; ++r) {
      const ScoreRow<Real> row(*s.terms, s.rows.begin + first + r, s.keys,
                               s.scores + (first + r) * s.stride);
      const auto finished = row.finish(nullptr);
      maxima[r] = finished.max;
      scales[r] = finished.scale;
      seen[r] = row.columns();
    }
    const Vector<Real> largest = largest_of_rows<Real>(maxima);
    tile_max = larger(largest, tile_max);
    SoftmaxLanes<Real> lanes(s.states + first, rows, largest);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first + r;
      if (lanes.factor[r] != Real(1) && s.out) {
        Real* out = s.out + row * s.out_stride;
        for (int64_t c = 0; c < s.out_columns; c += kCount) {
          store(out + c, load(out + c) * lanes.factor[r]);
        }
      }
      WeightsOfRow<Real> weights{s.scores + row * s.stride, scales[r], lanes.subtract(r),
                                 s.keep_factors ? s.keep_factors + row * s.stride : nullptr};
      weights.store_all(s.weights + row * s.weights_stride,
                        s.weights_low ? s.weights_low + row * s.weights_stride : nullptr, seen[r],
                        columns);
      sums[r] = weights.sum;
    }
    store(lanes.sum, load(lanes.sum) + sums_of_rows<Real>(sums));
    for (int64_t r = 0; r < rows; ++r) s.states[first + r] = lanes.state(r);
  }
  return largest_lane<Real>(tile_max);
}

template <class Real>
void gradient_step(const GradientStep<Real>& s) {
  const int64_t columns = padded_columns(s.keys.size());
  for (int64_t r = 0; r < s.rows.size(); ++r) {
    Real* weights = s.weights + r * s.stride;
    Real* grads = s.grads + r * s.stride;
    const Real* factors = s.keep_factors ? s.keep_factors + r * s.stride : nullptr;
    const LogSumExp<Real> lse = s.lse[r];  // -inf: the row saw no key
    const ScoreRow<Real> row(*s.terms, s.rows.begin + r, s.keys, weights);
    const Range seen = lse.high == kNegativeInfinity<Real> ? Range{0, 0} : row.columns();
    const Real scale = row.finish(s.slopes ? s.slopes + r * s.stride : nullptr).scale;
    for (int64_t c = seen.begin; c < seen.end; c += kLanes<Real>) {
      const Vector<Real> p =
          exponential_below_infinity((load(weights + c) * scale - lse.high) - lse.low);
      if (factors) {
        const Vector<Real> factor = load(factors + c);
        store(grads + c, p * (factor * load(grads + c) - s.deltas[r]));
        store(weights + c, p * factor);
      } else {
        store(grads + c, p * (load(grads + c) - s.deltas[r]));
        store(weights + c, p);
      }
    }
    for (Real* zeros : {weights, grads, s.slopes ? s.slopes + r * s.stride : nullptr}) {
      if (!zeros) continue;
      fill(zeros, 0, seen.begin, Real(0));
      fill(zeros, seen.end, columns, Real(0));
    }
  }
}

// --- rows ---

template <class Real>
Real row_max(const Real* row, int64_t count) {
  Vector<Real> max = broadcast(kNegativeInfinity<Real>);
  int64_t c = 0;
  for (; c + kLanes<Real> <= count; c += kLanes<Real>) max = larger(load(row + c), max);
  Real result = largest_lane<Real>(max);
  for (; c < count; ++c) result = row[c] > result ? row[c] : result;
  return result;
}

// One vector of exp_row.
template <class Real>
Vector<Real> exponentials(Real* row, Real subtract, Real subtract_low) {
  const Vector<Real> p = exponential((load(row) - subtract) - subtract_low);
  store(row, p);
  return p;
}

template <class Real>
Real exp_row(Real* row, int64_t count, Real subtract, Real subtract_low) {
  constexpr int kCount = kLanes<Real>;
  // Sixteen floats at least are summed apart, so that narrow vectors do not round more than wide.
  constexpr int kSums = 4;
  Vector<Real> parts[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * kCount <= count; c += kSums * kCount) {
    for (int part = 0; part < kSums; ++part) {
      parts[part] += exponentials(row + c + part * kCount, subtract, subtract_low);
    }
  }
  for (; c + kCount <= count; c += kCount) {
    parts[0] += exponentials(row + c, subtract, subtract_low);
  }
  if (const int64_t left = count - c; left > 0) {
    Real tail[kCount];
    store(tail, broadcast(kNegativeInfinity<Real>));
    std::copy_n(row + c, left, tail);
    parts[1] += exponentials(tail, subtract, subtract_low);
    std::copy_n(tail, left, row + c);
  }
  return sum_of_lanes<Real>((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

}  // namespace
}  // namespace flashattn::cpu
