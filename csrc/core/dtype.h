// Element types: the 16-bit floats as plain bit patterns, and the accumulation type of each.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace flashattn {

enum class DType : uint8_t { float16, bfloat16, float32, float64, boolean };

template <class To, class From>
FLASHATTN_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// float -> float16, round to nearest even; NaN stays NaN, overflow becomes infinity.
FLASHATTN_HD uint16_t float_to_half_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 leaves the rounded value in the low mantissa bits.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
#endif
}

FLASHATTN_HD float half_bits_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  // Rebias the exponent; a subnormal goes through an integer, so that a thread that flushes
  // subnormal floats to zero (torch.set_flush_denormal) gets the same value.
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t bits = magnitude + 0x38000000u;
  if ((half & 0x7c00u) == 0) {
    bits = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(half & 0x3ffu)) * 0x1p-24f);
  }
  if ((half & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;
  return bit_cast<float>(bits | sign);
#endif
}

// float -> bfloat16, round to nearest even; NaN stays NaN.
FLASHATTN_HD uint16_t float_to_bfloat_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

FLASHATTN_HD float bfloat_bits_to_float(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

struct float16 {
  uint16_t bits;
  float16() = default;
  FLASHATTN_HD explicit float16(float value) : bits(float_to_half_bits(value)) {}
  FLASHATTN_HD explicit operator float() const { return half_bits_to_float(bits); }
};

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  FLASHATTN_HD explicit bfloat16(float value) : bits(float_to_bfloat_bits(value)) {}
  FLASHATTN_HD explicit operator float() const { return bfloat_bits_to_float(bits); }
};

// What an element type is accumulated in: fp32, and fp64 for fp64.
template <class Element>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class Element>
using Accumulator = typename AccumulatorOf<Element>::type;

// One conversion for every pair: a 16-bit float is reached through fp32.
template <class To, class From>
FLASHATTN_HD To convert(From value) {
  if constexpr (sizeof(From) == 2) {
    return static_cast<To>(static_cast<float>(value));
  } else if constexpr (sizeof(To) == 2) {
    return To(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

// Only element types have one: anything else does not compile.
// What converting to Element loses, in the type that it comes from; 0 where it loses everything.
template <class Element, class From>
FLASHATTN_HD From rounding_error(From value) {
  const From error = value - convert<From>(convert<Element>(value));
  return error - error == From(0) ? error : From(0);
}

template <class Element>
inline constexpr DType kDType = Element::not_an_element_type;
template <>
inline constexpr DType kDType<float> = DType::float32;
template <>
inline constexpr DType kDType<float16> = DType::float16;
template <>
inline constexpr DType kDType<bfloat16> = DType::bfloat16;
template <>
inline constexpr DType kDType<double> = DType::float64;
template <>
inline constexpr DType kDType<bool> = DType::boolean;

// Bytes of an element.
FLASHATTN_HD int size_of(DType dtype) {
  switch (dtype) {
    case DType::boolean: return 1;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::float32: return 4;
    case DType::float64: return 8;
  }
  return 0;
}

// Calls function with a value of the type that an input of attention consists of.
template <class Function>
auto with_element(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float16: return function(float16{});
    case DType::bfloat16: return function(bfloat16{});
    case DType::float64: return function(double{});
    default: return function(float{});  // booleans are never an input
  }
}

}  // namespace flashattn
