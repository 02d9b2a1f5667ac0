#include "core/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace flashattn {
namespace {

// A 16-bit float as its definition reads: sign, exponent and fraction put together with ldexp.
struct Format {
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  long double value(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    long double value;
    if (exponent == (1 << exponent_bits) - 1) {
      value = fraction ? std::numeric_limits<long double>::quiet_NaN()
                       : std::numeric_limits<long double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<long double>(fraction), 1 - bias() - fraction_bits);
    } else {
      value = std::ldexp(static_cast<long double>(fraction + (1 << fraction_bits)),
                         exponent - bias() - fraction_bits);
    }
    return bits & 0x8000 ? -value : value;
  }

  // Round to nearest even by search: the last pattern not above |x|, then the closer neighbour. The
  // neighbour of the largest finite number counts as the next power of two, as IEEE 754 rounds.
  uint16_t round(float x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const long double magnitude = std::fabs(static_cast<long double>(x));
    const auto infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << fraction_bits);
    if (std::isinf(x)) return sign | infinity;
    uint16_t low = 0, high = infinity;
    while (high - low > 1) {
      const auto middle = static_cast<uint16_t>((low + high) / 2);
      (value(middle) <= magnitude ? low : high) = middle;
    }
    const long double above = high == infinity ? std::ldexp(1.0L, bias() + 1) : value(high);
    const long double to_low = magnitude - value(low), to_high = above - magnitude;
    const bool up = to_high < to_low || (to_high == to_low && (low & 1));
    return sign | (up ? high : low);
  }
};

constexpr Format kHalf{5, 10}, kBfloat{8, 7};

// The floats around every midpoint and every representable number of a format, and random patterns.
std::vector<float> interesting_floats(const Format& format) {
  std::vector<float> floats{0.0f,
                            std::numeric_limits<float>::min(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::infinity(),
                            65504.0f,
                            65519.996f,
                            65520.0f,
                            65520.004f};
  for (uint32_t bits = 0; bits < 0x7fffu; ++bits) {
    const long double low = format.value(static_cast<uint16_t>(bits));
    const long double high = format.value(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    for (const long double x : {low, (low + high) / 2}) {
      const auto nearest = static_cast<float>(x);
      floats.push_back(nearest);
      floats.push_back(std::nextafter(nearest, 0.0f));
      floats.push_back(std::nextafter(nearest, std::numeric_limits<float>::infinity()));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (value == value) floats.push_back(value);
  }
  return floats;
}

TEST(DType, HalfToFloatIsExactForEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = half_bits_to_float(static_cast<uint16_t>(bits));
    const long double expected = kHalf.value(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(value, expected) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << std::hex << bits;
    }
  }
}

TEST(DType, BfloatToFloatIsExactForEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bfloat_bits_to_float(static_cast<uint16_t>(bits));
    const long double expected = kBfloat.value(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(value, expected) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << std::hex << bits;
    }
  }
}

template <class Element>
void expect_round_trip() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    Element element;
    element.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(element);
    const Element back(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(back))) << std::hex << bits;
      ASSERT_EQ(back.bits & 0x8000, element.bits & 0x8000) << std::hex << bits;
    } else {
      ASSERT_EQ(back.bits, element.bits) << std::hex << bits;
    }
  }
}

TEST(DType, EveryHalfSurvivesTheRoundTrip) { expect_round_trip<float16>(); }
TEST(DType, EveryBfloatSurvivesTheRoundTrip) { expect_round_trip<bfloat16>(); }

TEST(DType, HalfRoundsToNearestEven) {
  for (const float value : interesting_floats(kHalf)) {
    for (const float x : {value, -value}) {
      ASSERT_EQ(float_to_half_bits(x), kHalf.round(x)) << std::hexfloat << x;
    }
  }
}

TEST(DType, BfloatRoundsToNearestEven) {
  for (const float value : interesting_floats(kBfloat)) {
    for (const float x : {value, -value}) {
      ASSERT_EQ(float_to_bfloat_bits(x), kBfloat.round(x)) << std::hexfloat << x;
    }
  }
}

TEST(DType, NaNOfEveryPayloadStaysNaN) {
  for (const uint32_t payload : {1u, 0x1fffu, 0x2000u, 0xffffu, 0x10000u, 0x400000u, 0x7fffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000u | payload);
      EXPECT_TRUE(std::isnan(static_cast<float>(float16(nan)))) << std::hex << payload;
      EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(nan)))) << std::hex << payload;
    }
  }
}

#if defined(__SSE2__)
// torch.set_flush_denormal(True) sets these two bits of a thread; hardware conversions ignore them,
// and so must these, or two instruction sets would disagree.
TEST(DType, FlushingSubnormalFloatsChangesNoHalf) {
  const unsigned before = _mm_getcsr();
  int wrong = 0;
  _mm_setcsr(before | 0x8040u);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7fff) > 0x7c00) continue;
    volatile auto read_here = static_cast<uint16_t>(bits);  // not before the mode is set
    const uint16_t half = read_here;
    wrong += float_to_half_bits(half_bits_to_float(half)) != half;
  }
  _mm_setcsr(before);
  EXPECT_EQ(wrong, 0);
}
#endif

TEST(DType, ConvertGoesThroughFloatBothWays) {
  EXPECT_EQ(convert<float16>(1.5f).bits, 0x3e00);
  EXPECT_EQ(convert<float16>(1.5).bits, 0x3e00);
  EXPECT_EQ(convert<bfloat16>(-2.0f).bits, 0xc000);
  EXPECT_EQ(convert<float>(float16(0.25f)), 0.25f);
  EXPECT_EQ(convert<double>(bfloat16(3.0f)), 3.0);
  EXPECT_EQ(convert<bfloat16>(float16(0.5f)).bits, 0x3f00);
  EXPECT_EQ(convert<float16>(bfloat16(1e30f)).bits, 0x7c00);
  EXPECT_EQ(convert<float16>(float16(7.0f)).bits, float16(7.0f).bits);
  EXPECT_EQ(convert<double>(0.1), 0.1);
  EXPECT_EQ(convert<float>(0.1), 0.1f);
  EXPECT_EQ(convert<double>(0.1f), static_cast<double>(0.1f));
}

TEST(DType, EachTypeKnowsItselfAndItsAccumulator) {
  EXPECT_EQ(kDType<float16>, DType::float16);
  EXPECT_EQ(kDType<bfloat16>, DType::bfloat16);
  EXPECT_EQ(kDType<float>, DType::float32);
  EXPECT_EQ(kDType<double>, DType::float64);
  EXPECT_EQ(kDType<bool>, DType::boolean);
  EXPECT_TRUE((std::is_same_v<Accumulator<float16>, float>));
  EXPECT_TRUE((std::is_same_v<Accumulator<bfloat16>, float>));
  EXPECT_TRUE((std::is_same_v<Accumulator<float>, float>));
  EXPECT_TRUE((std::is_same_v<Accumulator<double>, double>));
}

// Views of torch tensors are read as these types, so they must be bare bit patterns.
TEST(DType, SixteenBitTypesAreBarePatterns) {
  EXPECT_EQ(sizeof(float16), 2u);
  EXPECT_EQ(sizeof(bfloat16), 2u);
  EXPECT_TRUE(std::is_trivially_copyable_v<float16> &&
              std::is_trivially_default_constructible_v<float16>);
  EXPECT_TRUE(std::is_trivially_copyable_v<bfloat16> &&
              std::is_trivially_default_constructible_v<bfloat16>);
}

TEST(DType, BitCastKeepsTheBits) {
  EXPECT_EQ(bit_cast<uint32_t>(-0.0f), 0x80000000u);
  EXPECT_EQ(bit_cast<uint64_t>(1.0), 0x3ff0000000000000u);
  EXPECT_EQ(bit_cast<double>(bit_cast<uint64_t>(3.75)), 3.75);
}

}  // namespace
}  // namespace flashattn
