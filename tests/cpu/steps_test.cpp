// What each instruction set does to a tile of scores, with every term of the formula.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "microkernel_fixture.h"

namespace flashattn::cpu {
namespace {

struct TermsCase {
  const char* name;
  double scale = 0.3, softcap = 0;
  bool causal = false;
  int64_t window_left = kUnlimited;
  DType mask = DType::float64;  // float64 here: none
  bool alibi = false;
  int64_t mask_column_stride = 1;
};

constexpr TermsCase kTermsCases[] = {
    {"plain"},
    {"negative scale", -0.3},
    {"softcap", 0.3, 2},
    {"causal", 0.3, 0, true},
    {"window", 0.3, 0, true, 9},
    {"alibi", 0.3, 0, false, kUnlimited, DType::float64, true},
    {"bool mask", 0.3, 0, false, kUnlimited, DType::boolean},
    {"strided bool mask", 0.3, 0, false, kUnlimited, DType::boolean, false, 3},
    {"half mask", 0.3, 0, false, kUnlimited, DType::float16},
    {"float mask", 0.3, 0, true, kUnlimited, DType::float32},
    {"strided float mask", 0.3, 0, false, kUnlimited, DType::float32, false, 2},
    {"everything", 0.3, 2, true, 30, DType::bfloat16, true},
};

// One tile of rows and keys, its dot products and the scores that the formula gives.
template <class Real>
struct TermsTile {
  static constexpr Range kRows{20, 41}, kKeys{16, 61};  // 21 x 45
  static constexpr int64_t kStride = 64;
  AttentionProblem problem;
  std::vector<unsigned char> mask_memory;
  Real slope = Real(0.05);
  std::vector<Real> dots;

  TermsTile(const TermsCase& test, std::vector<Real> dot_products) : dots(std::move(dot_products)) {
    problem.scale = test.scale;
    problem.softcap = test.softcap;
    problem.mask_rule = {test.causal, test.window_left, kUnlimited, Alignment::top_left};
    if (test.alibi) problem.alibi_slopes = {&slope, {1, 1, 1, 1}, {0, 0, 0, 0}};
    if (test.mask != DType::float64) {
      const int64_t columns = 70 * test.mask_column_stride;
      mask_memory.resize(50 * columns * 4);
      for (int64_t i = 0; i < 50 * columns; ++i) {
        const float value = i % 7 == 0 ? -INFINITY : static_cast<float>(i % 11) * 0.25f;
        if (test.mask == DType::boolean) mask_memory[i] = i % 7 != 0;
        if (test.mask == DType::float16) set(i, float16(value));
        if (test.mask == DType::bfloat16) set(i, bfloat16(value));
        if (test.mask == DType::float32) set(i, value);
      }
      problem.attn_mask = {
          {mask_memory.data(), {1, 1, 50, 70}, {0, 0, columns, test.mask_column_stride}},
          test.mask};
    }
  }
  ScoreTerms<Real> terms() const { return {problem, 0, 0, problem.mask_rule.for_sequence(50, 64)}; }
  double dot(int64_t i, int64_t j) const {
    return dots[(i - kRows.begin) * kStride + j - kKeys.begin];
  }
  double capped(int64_t i, int64_t j) const {
    const double x = problem.scale * dot(i, j);
    return problem.softcap > 0 ? problem.softcap * std::tanh(x / problem.softcap) : x;
  }
  double slope_of(int64_t i, int64_t j) const {
    const double t = problem.softcap > 0 ? capped(i, j) / problem.softcap : 0;
    return 1 - t * t;
  }
  double score(int64_t i, int64_t j) const {
    double result = capped(i, j);
    if (problem.attn_mask) {
      const auto& view = problem.attn_mask.view;
      const int64_t at = i * view.stride[2] + j * view.stride[3];
      switch (problem.attn_mask.dtype) {
        case DType::boolean: result = mask_memory[at] ? result : -INFINITY; break;
        case DType::float16: result += convert<double>(get<float16>(at)); break;
        case DType::bfloat16: result += convert<double>(get<bfloat16>(at)); break;
        default: result += get<float>(at);
      }
    }
    if (problem.alibi_slopes) result += slope * alibi_distance<double>(i, 0, j);
    return problem.mask_rule.for_sequence(50, 64).visible(i, j) ? result : -INFINITY;
  }

 private:
  template <class T>
  void set(int64_t i, T value) {
    std::memcpy(&mask_memory[i * sizeof(T)], &value, sizeof(T));
  }
  template <class T>
  T get(int64_t i) const {
    T value;
    std::memcpy(&value, &mask_memory[i * sizeof(T)], sizeof(T));
    return value;
  }
};

TYPED_TEST(Microkernel, ScoreTile) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  using Tile = TermsTile<Real>;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const TermsCase& test : kTermsCases) {
      const Tile tile(test, this->template normal<Real>(Tile::kRows.size() * Tile::kStride));
      auto scores = tile.dots;
      std::vector<Real> slopes(scores.size());
      kernels.score_tile(tile.terms(), Tile::kRows, Tile::kKeys, scores.data(), Tile::kStride,
                         slopes.data());
      for (int64_t i = Tile::kRows.begin; i < Tile::kRows.end; ++i) {
        for (int64_t j = Tile::kKeys.begin; j < Tile::kKeys.end; ++j) {
          const int64_t at = (i - Tile::kRows.begin) * Tile::kStride + j - Tile::kKeys.begin;
          const double expected = tile.score(i, j);
          if (std::isinf(expected)) {
            ASSERT_EQ(scores[at], Real(expected)) << name << ' ' << test.name;
          } else {
            ASSERT_NEAR(scores[at], expected, 8 * this->kEpsilon) << name << ' ' << test.name;
          }
          const bool visible = tile.terms().mask.visible(i, j);
          ASSERT_NEAR(slopes[at], visible ? tile.slope_of(i, j) : slopes[at], 16 * this->kEpsilon)
              << name << ' ' << test.name;
        }
      }
    }
  }
}

TYPED_TEST(Microkernel, SoftmaxStepOverTwoTiles) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  using Tile = TermsTile<Real>;
  constexpr int64_t kRows = 21, kColumns = 48, kOut = 32;
  // An operand of 16 bits rounds its weights.
  const double weight_error = sizeof(Operand) == 2 ? 1.0 / 256 : 40 * this->kEpsilon;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const TermsCase& test : kTermsCases) {
      for (const bool dropout : {false, true}) {
        const Tile tile(test, this->template normal<Real>(kRows * Tile::kStride));
        const ScoreTerms<Real> terms = tile.terms();
        std::vector<Real> factors(kRows * Tile::kStride);
        for (Real& f : factors) f = this->random() % 4 ? Real(1) : Real(0);
        std::vector<OnlineSoftmax<Real>> states(kRows);
        std::vector<Real> out(kRows * kOut, Real(1));
        std::vector<Operand> weights(kRows * 64, Operand(7.0f)), weights_low = weights;
        constexpr bool kRounds = !std::is_same_v<Operand, Real>;
        Real largest = kNegativeInfinity<Real>;
        double wanted_largest = -INFINITY;
        for (int step = 0; step < 2; ++step) {  // the same keys twice, the second time higher
          auto dots = tile.dots;
          for (Real& dot : dots) dot += Real(step);
          Tile shifted(test, dots);
          auto scores = dots;
          largest = std::max(
              largest, kernels.softmax_step({&terms, Tile::kRows, Tile::kKeys, scores.data(),
                                             Tile::kStride, dropout ? factors.data() : nullptr,
                                             states.data(), out.data(), kOut, kOut, weights.data(),
                                             kRounds ? weights_low.data() : nullptr, 64}));
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t c = 0; c < kColumns; ++c) {
              const int64_t i = Tile::kRows.begin + r, j = Tile::kKeys.begin + c;
              const double score = c < Tile::kKeys.size() ? shifted.score(i, j) : -INFINITY;
              wanted_largest = std::max(wanted_largest, score);
              const double kept = dropout ? factors[r * Tile::kStride + c] : Real(1);
              const double p = std::isinf(score) ? 0 : std::exp(score - states[r].max) * kept;
              const double weight = convert<double>(weights[r * 64 + c]);
              ASSERT_NEAR(weight, p, weight_error)
                  << name << ' ' << test.name << ' ' << r << ' ' << c;
              if (!kRounds) continue;
              ASSERT_NEAR(weight + convert<double>(weights_low[r * 64 + c]), p, 0x1p-16 * (1 + p))
                  << name << ' ' << test.name << ' ' << r << ' ' << c;
            }
            if (sizeof(Operand) == 2) {
              for (int64_t c = kColumns; c < 64; ++c) {
                ASSERT_EQ(convert<double>(weights[r * 64 + c]), 0) << "padding along depth";
                ASSERT_EQ(convert<double>(weights_low[r * 64 + c]), 0) << "padding along depth";
              }
            }
          }
        }
        ASSERT_NEAR(largest, wanted_largest, 8 * this->kEpsilon) << name << ' ' << test.name;
        for (int64_t r = 0; r < kRows; ++r) {
          double max = -INFINITY, first_max = -INFINITY, sum = 0;
          std::vector<double> all;
          for (int step = 0; step < 2; ++step) {
            auto dots = tile.dots;
            for (Real& dot : dots) dot += Real(step);
            const Tile shifted(test, dots);
            for (int64_t j = Tile::kKeys.begin; j < Tile::kKeys.end; ++j) {
              all.push_back(shifted.score(Tile::kRows.begin + r, j));
              max = std::max(max, all.back());
            }
            if (step == 0) first_max = max;
          }
          for (const double score : all) sum += std::isinf(max) ? 0 : std::exp(score - max);
          ASSERT_NEAR(states[r].sum, sum, 100 * this->kEpsilon * (1 + sum)) << name;
          if (std::isinf(max)) {
            ASSERT_EQ(states[r].max, kNegativeInfinity<Real>);
            continue;
          }
          ASSERT_NEAR(states[r].max, max, 8 * this->kEpsilon) << name << ' ' << test.name;
          // Whatever `out` held before the first key is scaled away, then rescaled once.
          for (int64_t c = 0; c < kOut; ++c) {
            ASSERT_EQ(out[r * kOut + c], Real(0)) << name << ' ' << first_max;
          }
        }
      }
    }
  }
}

TYPED_TEST(Microkernel, GradientStep) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  using Tile = TermsTile<Real>;
  constexpr int64_t kRows = 21, kStride = Tile::kStride;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const TermsCase& test : kTermsCases) {
      for (const bool dropout : {false, true}) {
        const Tile tile(test, this->template normal<Real>(kRows * kStride));
        const ScoreTerms<Real> terms = tile.terms();
        std::vector<Real> factors(kRows * kStride);
        for (Real& f : factors) f = this->random() % 4 ? Real(1.25) : Real(0);
        std::vector<LogSumExp<Real>> lse(kRows, {Real(2), Real(0.125)});
        lse[3] = {kNegativeInfinity<Real>, Real(0)};  // a row that saw no key
        const auto deltas = this->template normal<Real>(kRows);
        const auto before = this->template normal<Real>(kRows * kStride);
        auto weights = tile.dots, grads = before;
        std::vector<Real> slopes(test.softcap > 0 ? kRows * kStride : 0);
        kernels.gradient_step({&terms, Tile::kRows, Tile::kKeys, kStride, lse.data(), deltas.data(),
                               dropout ? factors.data() : nullptr, weights.data(), grads.data(),
                               slopes.empty() ? nullptr : slopes.data()});
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t c = 0; c < Tile::kKeys.size(); ++c) {
            const int64_t at = r * kStride + c;
            const double score = tile.score(Tile::kRows.begin + r, Tile::kKeys.begin + c);
            const double p = r == 3 || std::isinf(score) ? 0 : std::exp(score - 2.125);
            const double factor = dropout ? factors[at] : Real(1);
            ASSERT_NEAR(weights[at], p * factor, 40 * this->kEpsilon * (1 + p)) << name;
            ASSERT_NEAR(grads[at], p * (factor * before[at] - deltas[r]),
                        100 * this->kEpsilon * (1 + p))
                << name << ' ' << test.name;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
