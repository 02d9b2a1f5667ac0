// Each instruction set that this processor has, against plain loops in long double.
#include "cpu/microkernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/microkernel_tables.h"

namespace flashattn::cpu {
namespace {

template <class Real>
std::vector<const Microkernels<Real>*> tables() {
  constexpr bool kIsFloat = std::is_same_v<Real, float>;
  std::vector<const Microkernels<Real>*> result;
  const auto add = [&](const auto& for_float, const auto& for_double) {
    if constexpr (kIsFloat) {
      result.push_back(&for_float);
    } else {
      result.push_back(&for_double);
    }
  };
  add(kBaselineFloat, kBaselineDouble);
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2) add(kAvx2Float, kAvx2Double);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    add(kAvx512Float, kAvx512Double);
  }
#endif
  return result;
}

template <class Real>
struct Microkernel : testing::Test {
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  static constexpr Real kNaN = std::numeric_limits<Real>::quiet_NaN();
  static constexpr Real kEpsilon = std::numeric_limits<Real>::epsilon();

  std::mt19937 random{3};
  std::vector<Real> normal(int64_t count) {
    std::normal_distribution<Real> distribution;
    std::vector<Real> result(static_cast<size_t>(count));
    for (Real& x : result) x = distribution(random);
    return result;
  }
};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(Microkernel, Reals);

// Exactly as much memory as the product may touch, so that a sanitizer sees one step too far.
TYPED_TEST(Microkernel, MultiplyForEveryShape) {
  using Real = TypeParam;
  for (const auto* kernels : tables<Real>()) {
    for (int64_t rows = 0; rows <= 14; ++rows) {
      for (const int64_t columns : {0, 16, 32, 48, 64, 80, 128, 144}) {
        for (const int64_t depth : {0, 1, 3, 17}) {
          for (const bool transposed : {false, true}) {
            for (const Store store : {Store::overwrite, Store::accumulate}) {
              const int64_t a_row = transposed ? 1 : depth + 2;
              const int64_t a_depth = transposed ? rows + 3 : 1;
              const bool some_a = rows > 0 && depth > 0;
              const auto a =
                  this->normal(some_a ? (rows - 1) * a_row + (depth - 1) * a_depth + 1 : 0);
              const auto b = this->normal(depth > 0 ? (depth - 1) * (columns + 16) + columns : 0);
              const int64_t c_stride = columns + 16;
              const auto before = this->normal(rows > 0 ? (rows - 1) * c_stride + columns : 0);
              auto c = before;
              kernels->multiply({rows, columns, depth, a.data(), a_row, a_depth, b.data(),
                                 columns + 16, c.data(), c_stride, store});
              for (int64_t i = 0; i < static_cast<int64_t>(c.size()); ++i) {
                const int64_t row = i / c_stride, column = i % c_stride;
                if (column >= columns) {
                  ASSERT_EQ(c[i], before[i]) << "between rows";
                  continue;
                }
                long double sum = store == Store::accumulate ? before[i] : 0;
                for (int64_t k = 0; k < depth; ++k) {
                  sum += static_cast<long double>(a[row * a_row + k * a_depth]) *
                         b[k * (columns + 16) + column];
                }
                ASSERT_NEAR(c[i], sum, 40 * this->kEpsilon)
                    << kernels->name << " rows " << rows << " columns " << columns << " depth "
                    << depth << " element " << row << ", " << column;
              }
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(Microkernel, RowMaxPassesOverNaN) {
  using Real = TypeParam;
  for (const auto* kernels : tables<Real>()) {
    for (int64_t count = 0; count < 70; ++count) {
      auto row = this->normal(count);
      for (Real& x : row) {
        if (this->random() % 5 == 0) x = this->kNaN;
        if (this->random() % 5 == 0) x = -this->kInfinity;
      }
      Real expected = -this->kInfinity;
      for (const Real x : row) expected = x > expected ? x : expected;
      ASSERT_EQ(kernels->row_max(row.data(), count), expected) << kernels->name << ' ' << count;
    }
    const std::vector<Real> nans(40, this->kNaN);
    EXPECT_EQ(kernels->row_max(nans.data(), 40), -this->kInfinity);
    std::vector<Real> large(33, std::numeric_limits<Real>::lowest());
    EXPECT_EQ(kernels->row_max(large.data(), 33), std::numeric_limits<Real>::lowest());
    large[32] = this->kInfinity;
    EXPECT_EQ(kernels->row_max(large.data(), 33), this->kInfinity);
  }
}

TYPED_TEST(Microkernel, ExpRowIsTheExponentialToThreeUlp) {
  using Real = TypeParam;
  const Real lowest = std::log(std::numeric_limits<Real>::min());
  for (const auto* kernels : tables<Real>()) {
    for (int64_t count = 0; count < 70; ++count) {
      auto row = this->normal(count);
      for (Real& x : row) x = std::min<Real>(0, x * std::pow(Real(10), Real(count % 7) - 3));
      const Real subtract = static_cast<Real>(count) - 30, low = Real(1e-3) * (count % 3);
      auto scores = row;
      for (Real& x : scores) x += subtract;
      auto result = scores;
      const Real sum = kernels->exp_row(result.data(), count, subtract, low);
      long double expected_sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        const Real argument = (scores[i] - subtract) - low;  // rounded as the contract says
        const long double expected = std::exp(static_cast<long double>(argument));
        expected_sum += result[i];
        if (argument < lowest + 1) {
          ASSERT_LE(std::fabs(result[i] - expected), std::numeric_limits<Real>::min() * 4);
        } else {
          ASSERT_NEAR(result[i] / expected, 1, 3 * this->kEpsilon) << kernels->name << argument;
        }
      }
      ASSERT_NEAR(sum, expected_sum, 70 * this->kEpsilon * (1 + std::fabs(sum)));
    }
  }
}

TYPED_TEST(Microkernel, ExpRowAtTheEdges) {
  using Real = TypeParam;
  constexpr Real kLowest = std::numeric_limits<Real>::lowest();
  for (const auto* kernels : tables<Real>()) {
    for (const int64_t count : {1, 7, 16, 17, 33}) {
      const auto all = [&](Real value, Real subtract, Real low) {
        std::vector<Real> row(static_cast<size_t>(count), value);
        const Real sum = kernels->exp_row(row.data(), count, subtract, low);
        for (const Real x : row) {
          const bool same = x == row[0] || (std::isnan(x) && std::isnan(row[0]));
          EXPECT_TRUE(same) << kernels->name << ": a tail differs from a full vector";
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
      EXPECT_TRUE(std::isnan(all(this->kNaN, 0, 0)));
      EXPECT_TRUE(std::isnan(all(0, this->kNaN, 0)));
      EXPECT_TRUE(std::isnan(all(this->kInfinity, this->kInfinity, 0)));
      EXPECT_TRUE(std::isnan(all(-this->kInfinity, -this->kInfinity, 0)));
    }
  }
}

// Every element alone among zeros: no lane is taken for another.
TYPED_TEST(Microkernel, ExpRowKeepsNaNInItsPlace) {
  using Real = TypeParam;
  for (const auto* kernels : tables<Real>()) {
    for (size_t at = 0; at < 21; ++at) {
      std::vector<Real> row(21, Real(0));
      row[at] = this->kNaN;
      EXPECT_TRUE(std::isnan(kernels->exp_row(row.data(), 21, 0, 0)));
      for (size_t i = 0; i < 21; ++i) EXPECT_EQ(std::isnan(row[i]), i == at) << kernels->name;
    }
  }
}

TYPED_TEST(Microkernel, ScaleRow) {
  using Real = TypeParam;
  for (const auto* kernels : tables<Real>()) {
    for (int64_t count = 0; count < 40; ++count) {
      const auto before = this->normal(count);
      auto row = before;
      kernels->scale_row(row.data(), count, Real(-0.3));
      for (size_t i = 0; i < row.size(); ++i) ASSERT_EQ(row[i], before[i] * Real(-0.3));
    }
  }
}

TEST(Microkernels, TheChoiceIsOneOfTheTables) {
  std::vector<std::string> names;
  for (const auto* kernels : tables<float>()) names.emplace_back(kernels->name);
  EXPECT_EQ(instruction_set(), microkernels<float>().name);
  EXPECT_EQ(std::string(instruction_set()), microkernels<double>().name);
  if (!std::getenv("FLASHATTN_EXT_CPU")) {
    EXPECT_EQ(instruction_set(), names.back());
  }
}

}  // namespace
}  // namespace flashattn::cpu
