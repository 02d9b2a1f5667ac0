// exp of a vector: within 2 units in the last place for float, libm's for double.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// Exactly 0 at -inf and where the result would be below the smallest normal number, infinity above
// the largest, but NaN at infinity; NaN stays NaN.
//
// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an
// integer and leaves it in the low mantissa bits. ln 2 is split in two, so that r keeps its digits.
inline Vector<float> exponential_below_infinity(Vector<float> x) {
  constexpr float kUnderflow = -0x1.5d589ep6f;
  const Vector<float> round = broadcast(0x1.8p23f);
  const Vector<float> shifted = multiply_add(x, broadcast(0x1.715476p0f), round);
  const Vector<float> n = shifted - round;
  const Vector<float> r =
      multiply_add(n, broadcast(-0x1.7f7d1cp-20f), multiply_add(n, broadcast(-0x1.62e4p-1f), x));
  // Minimax polynomial of exp on [-ln(2)/2, ln(2)/2].
  Vector<float> p = multiply_add(r, broadcast(0x1.6a2434p-10f), broadcast(0x1.1239e2p-7f));
  p = multiply_add(p, r, broadcast(0x1.5558f2p-5f));
  p = multiply_add(p, r, broadcast(0x1.555492p-3f));
  p = multiply_add(p, r, broadcast(0x1.fffffcp-2f));
  p = multiply_add(p, r, broadcast(1.0f));
  p = multiply_add(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(kUnderflow), _CMP_NLT_UQ), p, n);
#else
  // n goes into the exponent of p; what is no finite result is replaced.
  constexpr float kLargest = 0x1.62e42ep6f;
  const Vector<float> power = (Vector<float>)((Words)p + ((Words)shifted << 23));
  const Vector<float> finite = x < kUnderflow ? Vector<float>{} : power;
  return x <= kLargest ? finite : x + std::numeric_limits<float>::infinity();
#endif
}

inline Vector<double> exponential_below_infinity(Vector<double> x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

inline Vector<double> exponential(Vector<double> x) { return exponential_below_infinity(x); }

inline Vector<float> exponential(Vector<float> x) {
  constexpr float kOverflow = 89;
  return exponential_below_infinity(smaller(broadcast(kOverflow), x));
}

}  // namespace
}  // namespace flashattn::cpu
