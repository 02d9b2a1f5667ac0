// The score of one pair and its derivative, element by element.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace flashattn {

// softcap * tanh(x / softcap), with its derivative 1 - tanh^2.
template <class Real>
struct Softcap {
  Real cap;  // 0: none

  FLASHATTN_HD Real operator()(Real x) const {
    return cap > Real(0) ? cap * std::tanh(x / cap) : x;
  }
  // The derivative, from the capped value.
  FLASHATTN_HD Real slope_at(Real capped) const {
    if (!(cap > Real(0))) return Real(1);
    const Real t = capped / cap;
    return Real(1) - t * t;
  }
};

// d loss / d score, given the probability, d loss / d (dropped-out probability), the factor that
// dropout applied to the probability, and the row term delta = sum(grad_out * out) - grad_lse.
template <class Real>
FLASHATTN_HD Real score_gradient(Real probability, Real grad_probability, Real keep_factor,
                                 Real delta) {
  return probability * (keep_factor * grad_probability - delta);
}

// ALiBi: a penalty that grows with the distance from the diagonal.
template <class Real>
FLASHATTN_HD Real alibi_distance(int64_t row, int64_t shift, int64_t col) {
  const int64_t distance = row + shift - col;
  return static_cast<Real>(distance < 0 ? distance : -distance);
}

}  // namespace flashattn
