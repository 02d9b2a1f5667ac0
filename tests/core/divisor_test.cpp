#include "core/divisor.h"

#include <gtest/gtest.h>

#include <random>

namespace flashattn {
namespace {

constexpr int kLargest = std::numeric_limits<int32_t>::max();

void expect_exact(int dividend, int value) {
  const Divisor::Result result = Divisor(value).divide(dividend);
  EXPECT_EQ(result.quotient, dividend / value) << dividend << " / " << value;
  EXPECT_EQ(result.rest, dividend % value) << dividend << " % " << value;
}

TEST(Divisor, IsOneByDefault) {
  EXPECT_EQ(Divisor().value(), 1);
  EXPECT_EQ(Divisor().divide(kLargest).quotient, kLargest);
}

TEST(Divisor, SmallNumbers) {
  for (int value = 1; value < 200; ++value) {
    for (int dividend = 0; dividend < 1000; ++dividend) expect_exact(dividend, value);
  }
}

TEST(Divisor, AroundMultiplesOfLargeNumbers) {
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const int value = static_cast<int>(random() >> (1 + i % 31)) + 1;
    const int dividend = static_cast<int>(random() >> 1);
    expect_exact(dividend, value);
    const int multiple = dividend / value * value;
    expect_exact(multiple, value);
    if (multiple > 0) expect_exact(multiple - 1, value);
    expect_exact(kLargest, value);
  }
  expect_exact(kLargest, kLargest);
  expect_exact(kLargest - 1, kLargest);
}

TEST(Divisor, KeepsWithinItsRange) {
  EXPECT_EQ(Divisor(0).value(), 1);
  EXPECT_EQ(Divisor(int64_t{1} << 40).value(), kLargest);
}

}  // namespace
}  // namespace flashattn
