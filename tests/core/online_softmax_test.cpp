#include "core/online_softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace flashattn {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
using Row = std::vector<float>;

// log(sum exp) of a row in long double, as its maximum and the logarithm of what remains. The two
// are kept apart because their sum may not be representable.
struct Reference {
  long double max = -std::numeric_limits<long double>::infinity(), log_sum = 0;

  explicit Reference(const Row& row) {
    for (const float score : row) max = std::max<long double>(max, score);
    long double sum = 0;
    for (const float score : row) sum += score == -kInfinity ? 0 : std::exp(score - max);
    log_sum = std::log(sum);
  }
  long double lse() const { return max + log_sum; }
  long double probability(float score) const {
    return score == -kInfinity ? 0 : std::exp(score - max - log_sum);
  }
};

template <class Real>
OnlineSoftmax<Real> state_of(const float* scores, size_t count) {
  OnlineSoftmax<Real> state;
  for (size_t i = 0; i < count; ++i) state.add(scores[i]);
  return state;
}
template <class Real>
OnlineSoftmax<Real> state_of(const Row& row) {
  return state_of<Real>(row.data(), row.size());
}

// Rows of every kind; each has a finite score, and none has +inf or NaN.
std::vector<Row> finite_rows() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<Row> rows{{0.0f},
                        {kLowest},
                        {-kInfinity, 3.0f},
                        {3.0f, -kInfinity},
                        {-kInfinity, -kInfinity, -5.0f, -kInfinity},
                        {kLowest, kLowest, kLowest, kLowest, kLowest},
                        {kLowest, 0.0f, -kLowest},
                        {-kLowest, -kLowest, -kLowest},
                        {1e30f, 1e30f, -1e30f},
                        {-1e5f, -1e5f, -1e5f + 1},
                        {-104.0f, -103.0f, 88.0f, 89.0f}};
  for (const float scale : {1e-3f, 1.0f, 30.0f, 1e4f, 1e37f}) {
    for (const size_t length : {2, 7, 64, 300}) {
      Row row(length);
      for (float& score : row) score = scale * normal(random);
      rows.push_back(row);
      for (size_t i = 0; i < length; i += 3) row[i] = -kInfinity;
      if (length > 2) rows.push_back(row);
    }
  }
  return rows;
}

// Log-sum and probabilities of a state, against the reference of its row.
template <class Real>
void expect_matches(const OnlineSoftmax<Real>& state, const Row& row, Real tolerance) {
  const Reference expected(row);
  const LogSumExp<Real> lse = state.log_sum_exp();
  EXPECT_EQ(state.max, static_cast<Real>(expected.max));
  EXPECT_NEAR(std::log(state.sum), expected.log_sum, tolerance);
  EXPECT_NEAR(lse.high, expected.lse(), tolerance * std::max<Real>(1, std::fabs(lse.high)));
  EXPECT_TRUE(std::isfinite(lse.low));
  for (const float score : row) {
    const Real p = probability<Real>(score, lse);
    EXPECT_NEAR(p, expected.probability(score), tolerance) << "score " << score;
    EXPECT_NEAR(exponential<Real>(score - state.max) * state.inverse_sum(), p, tolerance);
  }
}

TEST(OnlineSoftmax, WholeRows) {
  for (const Row& row : finite_rows()) {
    SCOPED_TRACE(testing::PrintToString(row));
    expect_matches(state_of<float>(row), row, 2e-5f);
    expect_matches(state_of<double>(row), row, 1e-12);
  }
}

// Cut anywhere, empty and hidden parts included, joined from the left, from the right and as a
// tree.
TEST(OnlineSoftmax, AnySplitMergesToTheWhole) {
  for (const Row& row : finite_rows()) {
    SCOPED_TRACE(testing::PrintToString(row));
    const size_t step = row.size() > 50 ? row.size() / 7 : 1;
    for (size_t first = 0; first <= row.size(); first += step) {
      for (size_t second = first; second <= row.size(); second += step) {
        const auto a = state_of<double>(row.data(), first);
        const auto b = state_of<double>(row.data() + first, second - first);
        const auto c = state_of<double>(row.data() + second, row.size() - second);
        OnlineSoftmax<double> from_left = a, from_right = c, outer = b;
        from_left.merge(b);
        from_left.merge(c);
        from_right.merge(b);
        from_right.merge(a);
        outer.merge(OnlineSoftmax<double>{});
        outer.merge(c);
        outer.merge(a);
        for (const auto& state : {from_left, from_right, outer}) expect_matches(state, row, 1e-12);
      }
    }
  }
}

// The accumulated output follows the factor of raise_max: sum p * v, in one pass.
TEST(OnlineSoftmax, RaiseMaxRescalesAnAccumulatedOutput) {
  for (const Row& row : finite_rows()) {
    OnlineSoftmax<double> state;
    double out = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      out *= state.raise_max(row[i]);
      const double p = exponential<double>(row[i] - state.finite_or_zero(state.max));
      state.sum += p;
      out += p * static_cast<double>(i + 1);
    }
    const Reference expected(row);
    long double expected_out = 0;
    for (size_t i = 0; i < row.size(); ++i) expected_out += expected.probability(row[i]) * (i + 1);
    EXPECT_NEAR(out * state.inverse_sum(), expected_out, 1e-10) << testing::PrintToString(row);
  }
}

TEST(OnlineSoftmax, RowsWithoutAVisibleKey) {
  for (const Row& row : {Row{}, Row{-kInfinity}, Row{-kInfinity, -kInfinity, -kInfinity}}) {
    auto state = state_of<float>(row);
    state.merge(state_of<float>(row));
    state.merge(OnlineSoftmax<float>{});
    EXPECT_EQ(state.sum, 0.0f);
    EXPECT_EQ(state.inverse_sum(), 0.0f);
    const LogSumExp<float> lse = state.log_sum_exp();
    EXPECT_EQ(lse.high, -kInfinity);
    EXPECT_EQ(lse.low, 0.0f);
    for (const float score : {-kInfinity, 0.0f, 5.0f}) {
      EXPECT_EQ(probability<float>(score, lse), 0.0f);
    }
  }
}

// A row masked with finfo.min everywhere is the mean of V: each probability is 1 / n, although lse
// itself has no fraction left to hold log(n).
TEST(OnlineSoftmax, LowHoldsWhatAHugeLogSumExpLoses) {
  for (const float level : {kLowest, -1e30f, -1e10f, 1e10f, -kLowest}) {
    for (const int n : {1, 2, 3, 1000}) {
      OnlineSoftmax<float> state;
      for (int i = 0; i < n; ++i) state.add(level);
      const LogSumExp<float> lse = state.log_sum_exp();
      EXPECT_TRUE(std::isfinite(lse.high));
      EXPECT_NEAR(lse.low, std::log(n), 1e-6);
      EXPECT_NEAR(probability<float>(level, lse) * n, 1.0, 1e-5) << level << " x " << n;
      EXPECT_NEAR(state.inverse_sum() * n, 1.0, 1e-6);
    }
  }
}

TEST(OnlineSoftmax, ProbabilityIsNeverTheExponentialOfAPositiveDifference) {
  for (const float lse : {-3e38f, -1e5f, -89.0f, 0.0f, 89.0f, 1e5f, 3e38f}) {
    EXPECT_EQ(probability<float>(lse, {lse, 0.0f}), 1.0f);
    EXPECT_EQ(probability<float>(-kInfinity, {lse, 0.0f}), 0.0f);
    EXPECT_EQ(probability<float>(kLowest, {-kLowest, 0.0f}), 0.0f);
  }
}

// As in softmax: a NaN or +inf makes the row NaN, wherever it stands and whatever it meets.
TEST(OnlineSoftmax, NaNAndPlusInfinityReachTheResult) {
  for (const float poison : {kNaN, kInfinity}) {
    for (Row row : {Row{poison}, Row{1.0f, poison}, Row{poison, 1.0f}, Row{-kInfinity, poison},
                    Row{poison, -kInfinity}, Row{1.0f, poison, -kLowest}, Row{poison, poison}}) {
      SCOPED_TRACE(testing::PrintToString(row));
      for (size_t cut = 0; cut <= row.size(); ++cut) {
        const auto a = state_of<float>(row.data(), cut);
        const auto b = state_of<float>(row.data() + cut, row.size() - cut);
        for (const auto& [into, other] : {std::pair{a, b}, std::pair{b, a}}) {
          OnlineSoftmax<float> state = into;
          state.merge(other);
          EXPECT_TRUE(std::isnan(state.sum));
          EXPECT_TRUE(std::isnan(state.inverse_sum()));
          const LogSumExp<float> lse = state.log_sum_exp();
          EXPECT_TRUE(std::isnan(lse.high));
          EXPECT_TRUE(std::isnan(probability<float>(1.0f, lse)));
          EXPECT_TRUE(std::isnan(probability<float>(-kInfinity, lse)));
        }
      }
    }
  }
}

TEST(MergeWeights, JoinTwoPartsAsTheWholeRow) {
  for (const Row& row : finite_rows()) {
    SCOPED_TRACE(testing::PrintToString(row));
    const Reference whole(row);
    for (size_t cut = 0; cut <= row.size(); cut += std::max<size_t>(1, row.size() / 5)) {
      const auto a = state_of<double>(row.data(), cut);
      const auto b = state_of<double>(row.data() + cut, row.size() - cut);
      const double lse_a = a.log_sum_exp().high, lse_b = b.log_sum_exp().high;
      const auto weights = MergeWeights<double>::of(lse_a, lse_b);
      if (std::fabs(whole.max) < 1e6L) {
        EXPECT_NEAR(weights.lse, whole.lse(), 1e-9);
        const auto share = [&](double lse) {
          return std::exp(static_cast<long double>(lse) - whole.lse());
        };
        EXPECT_NEAR(weights.weight_a, share(lse_a), 1e-9);
        EXPECT_NEAR(weights.weight_b, share(lse_b), 1e-9);
      }
      EXPECT_NEAR(weights.weight_a + weights.weight_b, 1, 1e-12);
    }
  }
}

TEST(MergeWeights, AnEmptyPartChangesNothing) {
  for (const float lse : {-3.4e38f, -104.0f, -0.5f, 0.0f, 123.456f, 3.4e38f}) {
    const auto left = MergeWeights<float>::of(lse, -kInfinity);
    EXPECT_EQ(left.weight_a, 1.0f);
    EXPECT_EQ(left.weight_b, 0.0f);
    EXPECT_EQ(left.lse, lse);
    const auto right = MergeWeights<float>::of(-kInfinity, lse);
    EXPECT_EQ(right.weight_a, 0.0f);
    EXPECT_EQ(right.weight_b, 1.0f);
    EXPECT_EQ(right.lse, lse);
  }
}

TEST(MergeWeights, TwoEmptyPartsStayEmpty) {
  const auto weights = MergeWeights<float>::of(-kInfinity, -kInfinity);
  EXPECT_EQ(weights.weight_a, 0.0f);
  EXPECT_EQ(weights.weight_b, 0.0f);
  EXPECT_EQ(weights.lse, -kInfinity);
}

TEST(MergeWeights, NoDifferenceIsTooLarge) {
  for (const auto& [low, high] : {std::pair{-1e5f, 1e5f}, std::pair{kLowest, -kLowest},
                                  std::pair{-200.0f, 0.0f}, std::pair{0.0f, 3e38f}}) {
    const auto weights = MergeWeights<float>::of(low, high);
    EXPECT_EQ(weights.weight_a, 0.0f);
    EXPECT_EQ(weights.weight_b, 1.0f);
    EXPECT_EQ(weights.lse, high);
    EXPECT_EQ(MergeWeights<float>::of(high, low).weight_a, 1.0f);
  }
  const auto equal = MergeWeights<float>::of(-kLowest, -kLowest);
  EXPECT_EQ(equal.weight_a, 0.5f);
  EXPECT_EQ(equal.lse, -kLowest);
}

TEST(MergeWeights, NaNOfEitherSideReachesTheResult) {
  for (const float other : {kNaN, -kInfinity, -5.0f, 5.0f, kInfinity}) {
    for (const auto& weights :
         {MergeWeights<float>::of(kNaN, other), MergeWeights<float>::of(other, kNaN)}) {
      EXPECT_TRUE(std::isnan(weights.lse)) << other;
      EXPECT_TRUE(std::isnan(weights.weight_a)) << other;
      EXPECT_TRUE(std::isnan(weights.weight_b)) << other;
    }
  }
}

}  // namespace
}  // namespace flashattn
