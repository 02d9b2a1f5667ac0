// Maximum and exponential of rows on each instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "microkernel_fixture.h"

namespace flashattn::cpu {
namespace {

template <class Real>
struct MicrokernelRow : Microkernel<std::pair<Real, Real>> {
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  static constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(MicrokernelRow, Reals);

TYPED_TEST(MicrokernelRow, MaxPassesOverNaN) {
  using Real = TypeParam;
  for (const auto& [name, kernels] : tables<Real>()) {
    for (int64_t count = 0; count < 70; ++count) {
      auto row = this->template normal<Real>(count);
      for (Real& x : row) {
        if (this->random() % 5 == 0) x = this->kNaN;
        if (this->random() % 5 == 0) x = -this->kInfinity;
      }
      Real expected = -this->kInfinity;
      for (const Real x : row) expected = x > expected ? x : expected;
      ASSERT_EQ(kernels.row_max(row.data(), count), expected) << name << ' ' << count;
    }
    const std::vector<Real> nans(40, this->kNaN);
    EXPECT_EQ(kernels.row_max(nans.data(), 40), -this->kInfinity);
    std::vector<Real> large(33, std::numeric_limits<Real>::lowest());
    EXPECT_EQ(kernels.row_max(large.data(), 33), std::numeric_limits<Real>::lowest());
    large[32] = this->kInfinity;
    EXPECT_EQ(kernels.row_max(large.data(), 33), this->kInfinity);
  }
}

TYPED_TEST(MicrokernelRow, ExpIsTheExponentialToTwoUlp) {
  using Real = TypeParam;
  const Real lowest = std::log(std::numeric_limits<Real>::min());
  for (const auto& [name, kernels] : tables<Real>()) {
    for (int64_t count = 0; count < 70; ++count) {
      auto row = this->template normal<Real>(count);
      for (Real& x : row) x = std::min<Real>(0, x * std::pow(Real(10), Real(count % 7) - 3));
      const Real subtract = static_cast<Real>(count) - 30, low = Real(1e-3) * (count % 3);
      auto scores = row;
      for (Real& x : scores) x += subtract;
      auto result = scores;
      const Real sum = kernels.exp_row(result.data(), count, subtract, low);
      long double expected_sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        const Real argument = (scores[i] - subtract) - low;  // rounded as the contract says
        const long double expected = std::exp(static_cast<long double>(argument));
        expected_sum += result[i];
        if (argument < lowest + 1) {
          ASSERT_LE(std::fabs(result[i] - expected), std::numeric_limits<Real>::min() * 4);
        } else {
          ASSERT_NEAR(result[i] / expected, 1, 2 * this->kEpsilon) << name << argument;
        }
      }
      ASSERT_NEAR(sum, expected_sum, 70 * this->kEpsilon * (1 + std::fabs(sum)));
    }
  }
}

// Every 2,003rd float, but for the smallest results, which may be 0.
TEST(MicrokernelExp, IsWithinTwoUlpEverywhere) {
  constexpr float kLowest = -86.3f, kHighest = 88.72f;
  for (const auto& [name, kernels] : tables<float>()) {
    for (const float sign : {-1.0f, 1.0f}) {
      uint32_t bits = 1;
      while (true) {
        std::vector<float> x;
        for (; x.size() < 4096; bits += 2003) x.push_back(sign * bit_cast<float>(bits));
        auto result = x;
        kernels.exp_row(result.data(), 4096, 0, 0);
        for (size_t i = 0; i < x.size() && x[i] > kLowest && x[i] < kHighest; ++i) {
          const double expected = std::exp(static_cast<double>(x[i]));
          const float rounded = static_cast<float>(expected);
          const double ulp = std::nextafter(rounded, INFINITY) - static_cast<double>(rounded);
          ASSERT_LE(std::fabs(result[i] - expected), 2 * ulp) << name << ' ' << x[i];
        }
        if (!(x.back() > kLowest && x.back() < kHighest)) break;
      }
    }
  }
}

TYPED_TEST(MicrokernelRow, ExpAtTheEdges) {
  using Real = TypeParam;
  constexpr Real kLowest = std::numeric_limits<Real>::lowest();
  for (const auto& table : tables<Real>()) {
    for (const int64_t count : {1, 7, 16, 17, 33}) {
      const auto all = [&](Real value, Real subtract, Real low) {
        std::vector<Real> row(static_cast<size_t>(count), value);
        const Real sum = table.kernels.exp_row(row.data(), count, subtract, low);
        for (const Real x : row) {
          const bool same = x == row[0] || (std::isnan(x) && std::isnan(row[0]));
          EXPECT_TRUE(same) << table.name << ": a tail differs from a full vector";
        }
        EXPECT_EQ(std::isnan(sum), std::isnan(row[0]));
        return row[0];
      };
      EXPECT_EQ(all(-this->kInfinity, 0, 0), Real(0));
      EXPECT_EQ(all(-this->kInfinity, kLowest, 3), Real(0));
      EXPECT_EQ(all(kLowest, 0, 0), Real(0));
      EXPECT_EQ(all(kLowest, -kLowest, 0), Real(0));  // the difference overflows
      EXPECT_EQ(all(0, 0, 0), Real(1));
      EXPECT_EQ(all(kLowest, kLowest, 0), Real(1));
      EXPECT_NEAR(all(kLowest, kLowest, std::log(Real(8))), 0.125, 4 * this->kEpsilon);
      EXPECT_EQ(all(Real(1e6), 0, 0), this->kInfinity);
      EXPECT_EQ(all(std::numeric_limits<Real>::max(), 0, 0), this->kInfinity);
      EXPECT_EQ(all(this->kInfinity, 0, 0), this->kInfinity);
      EXPECT_TRUE(std::isnan(all(this->kNaN, 0, 0)));
      EXPECT_TRUE(std::isnan(all(0, this->kNaN, 0)));
      EXPECT_TRUE(std::isnan(all(this->kInfinity, this->kInfinity, 0)));
      EXPECT_TRUE(std::isnan(all(-this->kInfinity, -this->kInfinity, 0)));
    }
  }
}

// Every element alone among zeros: no lane is taken for another.
TYPED_TEST(MicrokernelRow, ExpKeepsNaNInItsPlace) {
  using Real = TypeParam;
  for (const auto& [name, kernels] : tables<Real>()) {
    for (size_t at = 0; at < 21; ++at) {
      std::vector<Real> row(21, Real(0));
      row[at] = this->kNaN;
      EXPECT_TRUE(std::isnan(kernels.exp_row(row.data(), 21, 0, 0)));
      for (size_t i = 0; i < 21; ++i) EXPECT_EQ(std::isnan(row[i]), i == at) << name;
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
