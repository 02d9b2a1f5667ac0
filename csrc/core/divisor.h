// Division by a number that is known long before what is divided: a multiplication and a shift.
#pragma once

#include <cstdint>
#include <limits>

#include "core/high_product.h"
#include "core/host_device.h"

namespace flashattn {

// Exact for 0 <= dividend < 2^31 and 1 <= value < 2^31. With 2^(shift-1) < value <= 2^shift the
// multiplier exceeds 2^(31+shift) / value by less than 1, and dividend / 2^(31+shift) times that is
// below 1 / value.
// (T. Granlund and P. Montgomery, Division by invariant integers using multiplication, PLDI 1994.)
class Divisor {
 public:
  Divisor() = default;  // by 1
  explicit Divisor(int64_t by) : value_(by < 1 ? 1 : by > kMost ? kMost : static_cast<int>(by)) {
    while ((int64_t{1} << shift_) < value_) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + value_ - 1) / value_);
  }

  struct Result {
    int quotient, rest;
  };
  FLASHATTN_HD Result divide(int dividend) const {
    const uint32_t twice = 2 * static_cast<uint32_t>(dividend);
    const int quotient = static_cast<int>(high_product(twice, multiplier_) >> shift_);
    return {quotient, dividend - quotient * value_};
  }
  FLASHATTN_HD int value() const { return value_; }

 private:
  static constexpr int kMost = std::numeric_limits<int32_t>::max();

  int value_ = 1;
  int shift_ = 0;
  uint32_t multiplier_ = uint32_t{1} << 31;
};

}  // namespace flashattn
