// Elementary functions without branches, so that the compiler turns a loop over them into SIMD code
// of whatever width it has.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace flashattn::cpu {

// exp(x) to 1.5 units in the last place for x <= 88; 0 for -inf, NaN for NaN; gradual underflow.
//
// exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2, where exp(r) is its Taylor
// polynomial of degree 7. 2^n comes in two factors, since 2^-149 has no exponent of its own.
inline float exponential_simd(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -105.f ? -105.f : x;          // exp(-105) rounds to 0; NaN stays NaN
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  float r = x - n * kLn2High;
  r = r - n * kLn2Low;
  float p = 1.f / 5040.f;
  p = p * r + 1.f / 720.f;
  p = p * r + 1.f / 120.f;
  p = p * r + 1.f / 24.f;
  p = p * r + 1.f / 6.f;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  p = p + 1.f;
  const int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(kRound);
  const int32_t half = exponent >> 1;
  const float scale_a = bit_cast<float>((half + 127) << 23);
  const float scale_b = bit_cast<float>((exponent - half + 127) << 23);
  return p * scale_a * scale_b;
}

inline double exponential_simd(double x) { return std::exp(x); }

}  // namespace flashattn::cpu
