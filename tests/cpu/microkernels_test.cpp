// Each instruction set that this processor has, against plain loops.
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

// The tables of one (element, operand) pair, by the name of their instruction set.
template <class Element, class Operand>
struct Named {
  const char* name;
  const Microkernels<Element, Operand>& kernels;
};

template <class Element, class Operand = Accumulator<Element>>
std::vector<Named<Element, Operand>> tables() {
  std::vector<Named<Element, Operand>> result;
  for (const InstructionSet& set : instruction_sets()) {
    if (!set.supported()) continue;
    if constexpr (std::is_same_v<Operand, bfloat16>) {
      if (set.bfloat16_products) result.push_back({set.name, *set.bfloat16_products});
    } else if constexpr (std::is_same_v<Element, float>) {
      result.push_back({set.name, set.kernels->for_float});
    } else if constexpr (std::is_same_v<Element, float16>) {
      result.push_back({set.name, set.kernels->for_float16});
    } else if constexpr (std::is_same_v<Element, bfloat16>) {
      result.push_back({set.name, set.kernels->for_bfloat16});
    } else {
      result.push_back({set.name, set.kernels->for_double});
    }
  }
  return result;
}

template <class Pair>
struct Microkernel : testing::Test {
  using Element = typename Pair::first_type;
  using Operand = typename Pair::second_type;
  using Real = Accumulator<Element>;
  static constexpr int kPair = sizeof(Operand) == 2 ? 2 : 1;
  static constexpr Real kEpsilon = std::numeric_limits<Real>::epsilon();

  std::mt19937 random{3};
  template <class T>
  std::vector<T> normal(int64_t count) {
    std::normal_distribution<double> distribution;
    std::vector<T> result(static_cast<size_t>(std::max<int64_t>(count, 0)));
    for (T& x : result) x = convert<T>(distribution(random));
    return result;
  }
  // What an operand holds of an element.
  static double as_operand(Element element) { return convert<double>(convert<Operand>(element)); }

  // The element of a packed right operand (depth, columns).
  static double right(const std::vector<Operand>& b, int64_t stride, int64_t depth,
                      int64_t column) {
    return convert<double>(b[(depth / kPair * stride + column) * kPair + depth % kPair]);
  }
};

using Pairs =
    testing::Types<std::pair<float, float>, std::pair<double, double>, std::pair<float16, float>,
                   std::pair<bfloat16, float>, std::pair<bfloat16, bfloat16>>;
TYPED_TEST_SUITE(Microkernel, Pairs);

// Exactly as much memory as the product may touch, so that a sanitizer sees one step too far.
TYPED_TEST(Microkernel, MultiplyForEveryShape) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  constexpr bool kPairs = TestFixture::kPair == 2;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    const MicrokernelUse<Element, Operand> use(kernels);
    for (const int64_t rows : {0, 1, 2, 3, 5, 6, 7, 13, 16, 20, 31, 32, 33, 50}) {
      for (const int64_t columns : {0, 16, 32, 48, 64, 80, 128, 144}) {
        for (const int64_t depth : {0, 1, 3, 17, 32, 70}) {
          for (const Store mode : {Store::overwrite, Store::accumulate}) {
            const int64_t padded = kPairs ? padded_depth<Operand>(depth) : depth;
            const int64_t a_stride = padded + 32, b_stride = columns + 16, c_stride = columns + 16;
            const int64_t a_rows = kPairs ? padded_columns(rows) : rows;
            auto a = this->template normal<Operand>(
                a_rows > 0 && padded > 0 ? (a_rows - 1) * a_stride + padded : 0);
            auto b = this->template normal<Operand>(
                padded > 0 ? (padded - this->kPair) * b_stride + columns * this->kPair : 0);
            for (int64_t k = depth; k < padded; ++k) {  // the padding along depth is zero
              for (int64_t r = 0; r < a_rows; ++r) a[r * a_stride + k] = Operand(0);
              for (int64_t c = 0; c < columns; ++c) {
                b[(k / 2 * b_stride + c) * 2 + k % 2] = Operand(0);
              }
            }
            const auto before =
                this->template normal<Real>(rows > 0 ? (rows - 1) * c_stride + columns : 0);
            auto c = before;
            kernels.multiply({rows, columns, depth, a.data(), a_stride, b.data(), b_stride,
                              c.data(), c_stride, mode});
            for (int64_t i = 0; i < static_cast<int64_t>(c.size()); ++i) {
              const int64_t row = i / c_stride, column = i % c_stride;
              if (column >= columns) {
                ASSERT_EQ(c[i], before[i]) << "between rows";
                continue;
              }
              long double sum = mode == Store::accumulate ? before[i] : 0;
              long double magnitude = std::fabs(sum);
              for (int64_t k = 0; k < depth; ++k) {
                const long double product =
                    static_cast<long double>(convert<double>(a[row * a_stride + k])) *
                    this->right(b, b_stride, k, column);
                sum += product;
                magnitude += std::fabs(product);
              }
              // Each of the products and sums rounds once.
              ASSERT_NEAR(c[i], sum, (depth + 2) * this->kEpsilon * magnitude)
                  << name << " rows " << rows << " columns " << columns << " depth " << depth
                  << " element " << row << ", " << column;
            }
          }
        }
      }
    }
  }
}

// A matrix inside a larger array: contiguous, or with a gap between neighbours.
template <class Element>
struct Source {
  std::vector<Element> memory;
  StridedMatrix<const Element> matrix;

  Source(std::vector<Element> elements, int64_t rows, int64_t columns, int64_t column_stride)
      : memory(std::move(elements)),
        matrix{memory.data(), (columns + 3) * column_stride, column_stride, rows, columns} {}
  static int64_t size(int64_t rows, int64_t columns, int64_t column_stride) {
    return rows > 0 && columns > 0
               ? (rows - 1) * (columns + 3) * column_stride + (columns - 1) * column_stride + 1
               : 0;
  }
  Element at(int64_t row, int64_t column) const {
    return matrix.data[row * matrix.row_stride + column * matrix.column_stride];
  }
};

TYPED_TEST(Microkernel, PacksEveryForm) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const int64_t rows : {0, 1, 2, 15, 16, 17, 33, 64}) {
      for (const int64_t columns : {0, 1, 2, 16, 31, 32, 40, 65}) {
        for (const int64_t column_stride : {1, 2}) {
          const Source<Element> from(
              this->template normal<Element>(Source<Element>::size(rows, columns, column_stride)),
              rows, columns, column_stride);
          const auto check = [&](const char* form, bool transposed, bool is_right,
                                 const auto& pack) {
            const int64_t depth = is_right == transposed ? columns : rows;
            const int64_t width = is_right == transposed ? rows : columns;
            const int64_t padded = padded_depth<Operand>(depth);
            const int64_t stride = is_right ? padded_columns(width) + 16 : padded + 32;
            std::vector<Operand> to(is_right ? padded * stride : padded_columns(width) * stride,
                                    Operand(7.0f));
            pack(from.matrix, to.data(), stride);
            const int64_t checked = TestFixture::kPair == 2 ? padded : depth;
            for (int64_t k = 0; k < checked; ++k) {
              for (int64_t w = 0; w < (is_right ? padded_columns(width) : width); ++w) {
                const bool inside = k < depth && w < width;
                const bool depth_is_row = is_right != transposed;
                const double expected =
                    inside ? this->as_operand(depth_is_row ? from.at(k, w) : from.at(w, k)) : 0;
                const double got =
                    is_right ? this->right(to, stride, k, w) : convert<double>(to[w * stride + k]);
                ASSERT_EQ(got, expected) << name << ' ' << form << ' ' << rows << " x " << columns
                                         << " depth " << k << " width " << w;
              }
            }
          };
          check("left", false, false, kernels.pack_left);
          check("right", false, true, kernels.pack_right);
          check("left_transposed", true, false, kernels.pack_left_transposed);
          check("right_transposed", true, true, kernels.pack_right_transposed);
        }
      }
    }
  }
}

TYPED_TEST(Microkernel, StoresMatricesAndWhatRoundingLost) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  const Real factor = Real(0.3);
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const int64_t rows : {0, 1, 7, 16, 19}) {
      for (const int64_t columns : {0, 1, 15, 16, 40}) {
        for (const int64_t column_stride : {1, 3}) {
          const int64_t stride = padded_columns(columns), stride_t = padded_columns(rows);
          const auto from = this->template normal<Real>(rows * stride);
          std::vector<Real> from_t(stride * stride_t);
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < columns; ++c) from_t[c * stride_t + r] = from[r * stride + c];
          }
          const auto check = [&](const auto& call, const auto& expected) {
            std::vector<Element> to(Source<Element>::size(rows, columns, column_stride),
                                    convert<Element>(7.0));
            StridedMatrix<Element> matrix{to.data(), (columns + 3) * column_stride, column_stride,
                                          rows, columns};
            call(matrix);
            for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
              const int64_t row = i / matrix.row_stride, offset = i % matrix.row_stride;
              const int64_t column = offset / column_stride;
              const bool inside = offset % column_stride == 0 && column < columns;
              const Element wanted =
                  inside ? expected(from[row * stride + column] * factor) : convert<Element>(7.0);
              ASSERT_EQ(convert<double>(to[i]), convert<double>(wanted)) << name << ' ' << i;
            }
          };
          const auto rounded = [](Real exact) { return convert<Element>(exact); };
          const auto lost = [](Real exact) {
            return convert<Element>(rounding_error<Element>(exact));
          };
          check([&](auto to) { kernels.store(from.data(), stride, factor, to); }, rounded);
          check([&](auto to) { kernels.store_rounding(from.data(), stride, factor, to); }, lost);
          check([&](auto to) { kernels.store_transposed(from_t.data(), stride_t, factor, to); },
                rounded);
        }
      }
    }
  }
}

TYPED_TEST(Microkernel, DropoutTileIsTheStream) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  const int64_t rng_state[2] = {-5, (int64_t{1} << 40) + 7};
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const double p : {0.0, 0.1, 0.9, 1.0}) {
      const DropoutStream stream = Dropout{rng_state, Dropout::threshold_for(p)}.stream(3, 5, 2);
      for (const Range keys :
           {Range{0, 1}, Range{0, 300}, Range{5, 37}, Range{96, 224}, Range{1000, 1700}}) {
        const int64_t stride = padded_columns(keys.size()) + 16;
        std::vector<Real> factors(3 * stride, NAN);
        kernels.dropout_tile(stream, {70, 73}, keys, Real(1.5), factors.data(), stride);
        for (int64_t r = 0; r < 3; ++r) {
          for (int64_t c = 0; c < keys.size(); ++c) {
            const bool keep = stream.keep(70 + r, keys.begin + c);
            ASSERT_EQ(factors[r * stride + c], keep ? Real(1.5) : Real(0))
                << name << ' ' << p << ' ' << r << ' ' << keys.begin + c;
          }
          for (int64_t c = keys.size(); c < padded_columns(keys.size()); ++c) {
            ASSERT_FALSE(std::isnan(factors[r * stride + c])) << "a factor of the padding";
          }
        }
      }
    }
  }
}

// --- scores, forward and backward, with every term of the formula ---

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
        std::vector<Operand> weights(kRows * 64, Operand(7.0f));
        Real largest = kNegativeInfinity<Real>;
        double wanted_largest = -INFINITY;
        for (int step = 0; step < 2; ++step) {  // the same keys twice, the second time higher
          auto dots = tile.dots;
          for (Real& dot : dots) dot += Real(step);
          Tile shifted(test, dots);
          auto scores = dots;
          largest = std::max(
              largest,
              kernels.softmax_step({&terms, Tile::kRows, Tile::kKeys, scores.data(), Tile::kStride,
                                    dropout ? factors.data() : nullptr, states.data(), out.data(),
                                    kOut, kOut, weights.data(), 64}));
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t c = 0; c < kColumns; ++c) {
              const int64_t i = Tile::kRows.begin + r, j = Tile::kKeys.begin + c;
              const double score = c < Tile::kKeys.size() ? shifted.score(i, j) : -INFINITY;
              wanted_largest = std::max(wanted_largest, score);
              const double kept = dropout ? factors[r * Tile::kStride + c] : Real(1);
              const double p = std::isinf(score) ? 0 : std::exp(score - states[r].max) * kept;
              ASSERT_NEAR(convert<double>(weights[r * 64 + c]), p, weight_error)
                  << name << ' ' << test.name << ' ' << r << ' ' << c;
            }
            if (sizeof(Operand) == 2) {
              for (int64_t c = kColumns; c < 64; ++c) {
                ASSERT_EQ(convert<double>(weights[r * 64 + c]), 0) << "padding along depth";
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

// --- rows ---

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

TYPED_TEST(Microkernel, RowDotsAreThoseOfAProduct) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const int64_t rows : {0, 1, 16, 21}) {
      for (const int64_t columns : {0, 1, 16, 40, 64}) {
        for (const int64_t column_stride : {1, 2}) {
          const auto matrix = [&] {
            return Source<Element>(
                this->template normal<Element>(Source<Element>::size(rows, columns, column_stride)),
                rows, columns, column_stride);
          };
          const auto a = matrix(), b = matrix();
          std::vector<Real> sums(static_cast<size_t>(rows));
          kernels.row_dots(a.matrix, b.matrix, sums.data());
          const int64_t stride = padded_depth<Operand>(columns), width = padded_columns(rows);
          std::vector<Operand> left(width * stride), right(stride * width);
          std::vector<Real> product(rows * width);
          kernels.pack_left(a.matrix, left.data(), stride);
          kernels.pack_right_transposed(b.matrix, right.data(), width);
          const MicrokernelUse<Element, Operand> use(kernels);
          kernels.multiply({rows, width, columns, left.data(), stride, right.data(), width,
                            product.data(), width, Store::overwrite});
          for (int64_t r = 0; r < rows; ++r) {
            long double magnitude = 0;
            for (int64_t c = 0; c < columns; ++c) {
              magnitude += std::fabs(convert<double>(a.at(r, c)) * convert<double>(b.at(r, c)));
            }
            const Real wanted = product[r * width + r];
            if (std::is_same_v<Operand, Real>) {
              ASSERT_EQ(sums[r], wanted) << name << ' ' << rows << " x " << columns;
            } else {
              ASSERT_NEAR(sums[r], wanted, 2 * columns * this->kEpsilon * magnitude) << name;
            }
          }
        }
      }
    }
  }
}

TEST(Microkernels, TheChoiceIsTheBestSupportedSet) {
  for (const InstructionSet& set : instruction_sets()) {
    if (!set.supported()) continue;
    if (!std::getenv("FLASHATTN_EXT_CPU") && !std::getenv("ATEN_CPU_CAPABILITY")) {
      EXPECT_STREQ(instruction_set(), set.name);
      EXPECT_EQ(multiplies_bfloat16(), set.bfloat16_products != nullptr);
    }
    break;
  }
  EXPECT_STREQ(instruction_sets().back().name, "baseline");
}

}  // namespace
}  // namespace flashattn::cpu
