#include "core/softmax_gradient.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/online_softmax.h"

namespace flashattn {
namespace {

// One row of attention with everything that touches a score, in fp64: raw scores, softcap, ALiBi,
// a sink, dropout, and a loss that reads both out and lse.
struct AttentionRow {
  std::vector<double> raw, keep_factor, value;  // (len_k) each; value is grad_out . value[j]
  double cap = 0, slope = 0, sink = 0, grad_lse = 0;
  int64_t row = 0, shift = 0;

  std::vector<double> scores() const {
    std::vector<double> result(raw.size());
    for (size_t j = 0; j < raw.size(); ++j) {
      result[j] = Softcap<double>{cap}(raw[j]) +
                  slope * alibi_distance<double>(row, shift, static_cast<int64_t>(j));
    }
    return result;
  }
  LogSumExp<double> log_sum_exp() const {
    OnlineSoftmax<double> state;
    for (const double score : scores()) state.add(score);
    state.add(sink);
    return state.log_sum_exp();
  }
  double out() const {
    double sum = 0;
    const auto lse = log_sum_exp();
    const auto s = scores();
    for (size_t j = 0; j < s.size(); ++j) sum += keep_factor[j] * probability(s[j], lse) * value[j];
    return sum;
  }
  double loss() const { return out() + grad_lse * log_sum_exp().high; }
};

AttentionRow random_row(int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  AttentionRow row;
  for (int j = 0; j < 9; ++j) {
    row.raw.push_back(2 * normal(random));
    row.value.push_back(normal(random));
    row.keep_factor.push_back(random() % 4 ? 1 / 0.75 : 0);
  }
  row.cap = seed % 3 ? 1.5 * (seed % 3) : 0;
  row.slope = 0.1 * (seed % 4);
  row.sink = normal(random);
  row.grad_lse = seed % 2 ? normal(random) : 0;
  row.row = seed % 11;
  row.shift = seed % 5 - 2;
  return row;
}

double central_difference(AttentionRow row, double AttentionRow::* member) {
  constexpr double kStep = 1e-6;
  AttentionRow up = row, down = row;
  up.*member += kStep;
  down.*member -= kStep;
  return (up.loss() - down.loss()) / (2 * kStep);
}

TEST(SoftmaxGradient, MatchesFiniteDifferences) {
  for (int seed = 0; seed < 60; ++seed) {
    const AttentionRow row = random_row(seed);
    const auto lse = row.log_sum_exp();
    const auto scores = row.scores();
    const double delta = row.out() - row.grad_lse;

    double grad_slope = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      const double grad_score =
          score_gradient(probability(scores[j], lse), row.value[j], row.keep_factor[j], delta);
      const double distance = alibi_distance<double>(row.row, row.shift, static_cast<int64_t>(j));
      grad_slope += grad_score * distance;

      const Softcap<double> softcap{row.cap};
      AttentionRow up = row, down = row;
      up.raw[j] += 1e-6;
      down.raw[j] -= 1e-6;
      EXPECT_NEAR(grad_score * softcap.slope_at(softcap(row.raw[j])),
                  (up.loss() - down.loss()) / 2e-6, 1e-8)
          << "seed " << seed << " key " << j;
    }
    EXPECT_NEAR(grad_slope, central_difference(row, &AttentionRow::slope), 1e-7) << seed;
    // A sink has a probability and no value.
    EXPECT_NEAR(score_gradient(probability(row.sink, lse), 0.0, 0.0, delta),
                central_difference(row, &AttentionRow::sink), 1e-8)
        << seed;
  }
}

TEST(SoftmaxGradient, NoProbabilityNoGradient) {
  EXPECT_EQ(score_gradient(0.0f, 5.0f, 1.25f, -3.0f), 0.0f);
  EXPECT_EQ(score_gradient(0.0, 1e300, 1.0, 1e300), 0.0);
}

// One key without dropout: p = 1 and delta = dp, so the gradient is exactly 0.
TEST(SoftmaxGradient, ASingleKeyHasNoScoreGradient) {
  for (const float dp : {0.1f, -3.3f, 1e20f}) {
    EXPECT_EQ(score_gradient(1.0f, dp, 1.0f, dp), 0.0f);
  }
}

TEST(Softcap, NoCapIsTheIdentity) {
  const Softcap<float> none{0.0f};
  for (const float x : {0.0f, -1e30f, 7.5f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(none(x), x);
    EXPECT_EQ(none.slope_at(x), 1.0f);
  }
}

TEST(Softcap, StaysWithinTheCapForEveryScore) {
  for (const float cap : {1e-30f, 0.5f, 30.0f, 50.0f, 1e30f}) {
    const Softcap<float> softcap{cap};
    for (const float x :
         {0.0f, 1e-30f, 1.0f, 50.0f, 1e10f, std::numeric_limits<float>::max(),
          std::numeric_limits<float>::infinity(), std::numeric_limits<float>::denorm_min()}) {
      for (const float score : {x, -x}) {
        const float capped = softcap(score);
        EXPECT_LE(std::fabs(capped), cap) << cap << ' ' << score;
        EXPECT_EQ(std::signbit(capped), std::signbit(score)) << cap << ' ' << score;
        EXPECT_GE(softcap.slope_at(capped), 0.0f) << cap << ' ' << score;
        EXPECT_LE(softcap.slope_at(capped), 1.0f) << cap << ' ' << score;
      }
    }
    EXPECT_EQ(softcap.slope_at(softcap(0.0f)), 1.0f);
  }
  EXPECT_TRUE(std::isnan(Softcap<float>{30.0f}(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Softcap, SlopeIsTheDerivative) {
  for (const double cap : {0.7, 5.0, 30.0}) {
    const Softcap<double> softcap{cap};
    for (double x = -40; x <= 40; x += 0.37) {
      const double numeric = (softcap(x + 1e-6) - softcap(x - 1e-6)) / 2e-6;
      EXPECT_NEAR(softcap.slope_at(softcap(x)), numeric, 1e-8) << cap << ' ' << x;
    }
  }
}

TEST(Alibi, FallsWithTheDistanceFromTheDiagonalOnBothSides) {
  for (int64_t row = 0; row < 6; ++row) {
    for (int64_t shift = -3; shift <= 3; ++shift) {
      for (int64_t col = 0; col < 6; ++col) {
        const double distance = std::fabs(static_cast<double>(row + shift - col));
        EXPECT_EQ(alibi_distance<float>(row, shift, col), static_cast<float>(-distance));
        EXPECT_EQ(alibi_distance<double>(row, shift, col), -distance);
      }
    }
  }
  EXPECT_EQ(alibi_distance<double>(0, 0, int64_t{1} << 40), -std::ldexp(1.0, 40));
}

}  // namespace
}  // namespace flashattn
