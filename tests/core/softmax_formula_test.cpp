#include "core/softmax_formula.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace flashattn {
namespace {

template <class Real>
std::vector<Real> forward(SoftmaxKind kind, const std::vector<Real>& row) {
  const SoftmaxFormula formula{kind};
  const Real max = *std::max_element(row.begin(), row.end());
  Real sum = 0;
  for (const Real x : row) sum += std::exp(x - max);
  std::vector<Real> result;
  for (const Real x : row) {
    const Real term = formula.is_log() ? x - max : std::exp(x - max);
    result.push_back(formula.value(term, formula.normaliser(sum)));
  }
  return result;
}

std::vector<double> backward(SoftmaxKind kind, const std::vector<double>& grad,
                             const std::vector<double>& output) {
  const SoftmaxFormula formula{kind};
  const auto probability = [&](size_t i) {
    return formula.is_log() ? std::exp(output[i]) : output[i];
  };
  double sum = 0;
  for (size_t i = 0; i < grad.size(); ++i) sum += formula.summand(grad[i], probability(i));
  std::vector<double> result;
  for (size_t i = 0; i < grad.size(); ++i) {
    result.push_back(formula.gradient(grad[i], probability(i), sum));
  }
  return result;
}

TEST(SoftmaxFormula, SumsToOneAndLogIsItsLogarithm) {
  const std::vector<double> row{0.3, -2, 5, 5, -800};
  const auto p = forward(SoftmaxKind::softmax, row);
  const auto log_p = forward(SoftmaxKind::log_softmax, row);
  double sum = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    sum += p[i];
    EXPECT_NEAR(p[i], std::exp(log_p[i]), 1e-15);
  }
  EXPECT_NEAR(sum, 1, 1e-15);
  EXPECT_NEAR(log_p[4], -805 - std::log(2 + std::exp(-4.7) + std::exp(-7)), 1e-9);
}

TEST(SoftmaxFormula, HugeInputsKeepTheirDigits) {
  for (const float shift : {-1e7f, 1e7f}) {
    const auto log_p = forward<float>(SoftmaxKind::log_softmax, {shift, shift, shift + 1});
    EXPECT_NEAR(log_p[0], -1.551444f, 1e-6f);
    EXPECT_NEAR(log_p[2], -0.551444f, 1e-6f);
  }
}

TEST(SoftmaxFormula, ARowOfMinusInfinityIsNaNAsInTorch) {
  const float hidden = -std::numeric_limits<float>::infinity();
  for (const auto kind : {SoftmaxKind::softmax, SoftmaxKind::log_softmax}) {
    for (const float result : forward<float>(kind, {hidden, hidden})) {
      EXPECT_TRUE(std::isnan(result));
    }
  }
  EXPECT_EQ(forward<float>(SoftmaxKind::softmax, {hidden, 0.0f})[0], 0.0f);
  EXPECT_EQ(forward<float>(SoftmaxKind::log_softmax, {hidden, 0.0f})[0], hidden);
}

TEST(SoftmaxFormula, GradientMatchesFiniteDifferences) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (const auto kind : {SoftmaxKind::softmax, SoftmaxKind::log_softmax}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<double> row(6), grad(6);
      for (double& x : row) x = 2 * normal(random);
      for (double& g : grad) g = normal(random);
      const auto gradient = backward(kind, grad, forward(kind, row));
      const auto loss = [&](const std::vector<double>& x) {
        const auto y = forward(kind, x);
        double sum = 0;
        for (size_t i = 0; i < y.size(); ++i) sum += grad[i] * y[i];
        return sum;
      };
      for (size_t i = 0; i < row.size(); ++i) {
        auto up = row, down = row;
        up[i] += 1e-6;
        down[i] -= 1e-6;
        EXPECT_NEAR(gradient[i], (loss(up) - loss(down)) / 2e-6, 1e-8);
      }
    }
  }
}

}  // namespace
}  // namespace flashattn
