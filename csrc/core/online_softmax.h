// The softmax of a row that arrives in pieces (Milakov and Gimelshein, arXiv:1805.02867), and the
// one place where rows without a visible key are handled.
#pragma once

#include <cmath>

#include "core/constants.h"
#include "core/host_device.h"

namespace flashattn {

template <class Real>
FLASHATTN_HD Real exponential(Real x) {
  return std::exp(x);
}

// log(sum exp(score)) as an unevaluated sum of two numbers. Where |high| is so large that it has no
// fraction left (a row masked with finfo.min), `low` still holds the logarithm of the sum.
template <class Real>
struct LogSumExp {
  Real high, low;
};

template <class Real>
struct OnlineSoftmax {
  Real max = kNegativeInfinity<Real>;
  Real sum = 0;  // of exp(score - max)

  // What is subtracted from a score before exp: never -inf, so that -inf - (-inf) cannot occur.
  FLASHATTN_HD static Real finite_or_zero(Real max) {
    return max == kNegativeInfinity<Real> ? Real(0) : max;
  }

  // Raises the maximum and returns the factor that earlier sums and outputs are multiplied by.
  FLASHATTN_HD Real raise_max(Real candidate) {
    if (!(candidate > max)) return Real(1);
    const Real factor =
        max == kNegativeInfinity<Real> ? Real(0) : exponential<Real>(max - candidate);
    max = candidate;
    sum *= factor;
    return factor;
  }

  FLASHATTN_HD void add(Real score) {
    raise_max(score);
    sum += exponential<Real>(score - finite_or_zero(max));
  }

  // Joins the state of another part of the row; either may be empty.
  FLASHATTN_HD void merge(const OnlineSoftmax& other) {
    raise_max(other.max);
    if (other.max != kNegativeInfinity<Real>) {
      sum += other.sum * exponential<Real>(other.max - max);
    } else {
      sum += other.sum;  // 0, or NaN, which must not be lost
    }
  }

  // What the accumulated output is multiplied by. A row that saw no key gives 0.
  FLASHATTN_HD Real inverse_sum() const { return sum == Real(0) ? Real(0) : Real(1) / sum; }

  FLASHATTN_HD LogSumExp<Real> log_sum_exp() const {
    if (sum == Real(0)) return {kNegativeInfinity<Real>, Real(0)};
    const Real log_sum = std::log(sum);
    const Real high = max + log_sum;
    const Real low = (max - high) + log_sum;
    return {high, low == low ? low : Real(0)};
  }
};

// The probability of a score under a row's lse. A row that saw no key has probability 0 everywhere.
template <class Real>
FLASHATTN_HD Real probability(Real score, LogSumExp<Real> lse) {
  if (lse.high == kNegativeInfinity<Real>) return Real(0);
  return exponential<Real>((score - lse.high) - lse.low);
}

// How two partial results of one row are joined: out = weight_a * out_a + weight_b * out_b.
template <class Real>
struct MergeWeights {
  Real weight_a, weight_b, lse;

  FLASHATTN_HD static MergeWeights of(Real lse_a, Real lse_b) {
    // `larger` keeps a NaN of either side, which then reaches the result.
    const Real larger = lse_a != lse_a || lse_a > lse_b ? lse_a : lse_b;
    if (larger == kNegativeInfinity<Real>) return {Real(0), Real(0), larger};
    const Real a = exponential<Real>(lse_a - larger);
    const Real b = exponential<Real>(lse_b - larger);
    const Real sum = a + b;
    return {a / sum, b / sum, larger + std::log(sum)};
  }
};

}  // namespace flashattn
