// The formulas of softmax and log_softmax, element by element, for every kernel on every device.
//
// The maximum is always subtracted first, so log_softmax stays exact near -1e7; and -inf minus -inf
// makes a row of -inf NaN, as in torch (attention's empty rows are attention's rule, not
// softmax's).
#pragma once

#include <cmath>

#include "core/host_device.h"
#include "core/softmax_problem.h"

namespace flashattn {

struct SoftmaxFormula {
  SoftmaxKind kind;

  FLASHATTN_HD bool is_log() const { return kind == SoftmaxKind::log_softmax; }

  // What a row keeps of its sum of exp(x - max).
  template <class Real>
  FLASHATTN_HD Real normaliser(Real sum) const {
    return is_log() ? std::log(sum) : Real(1) / sum;
  }

  // The result. `term`: x - max for log_softmax, exp(x - max) for softmax.
  template <class Real>
  FLASHATTN_HD Real value(Real term, Real normaliser) const {
    return is_log() ? term - normaliser : term * normaliser;
  }

  // What backward sums along a row. `probability`: the softmax of the row.
  template <class Real>
  FLASHATTN_HD Real summand(Real grad, Real probability) const {
    return is_log() ? grad : grad * probability;
  }

  // The gradient, given that sum.
  template <class Real>
  FLASHATTN_HD Real gradient(Real grad, Real probability, Real sum) const {
    return is_log() ? grad - probability * sum : (grad - sum) * probability;
  }
};

}  // namespace flashattn
