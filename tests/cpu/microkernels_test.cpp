// The products and the packing of each instruction set, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "microkernel_fixture.h"

namespace flashattn::cpu {
namespace {

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

TYPED_TEST(Microkernel, TileRoundingIsWhatAnOperandLoses) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    const auto tile = this->template normal<Real>(5 * 64);
    std::vector<Real> lost(tile.size(), Real(7));
    kernels.tile_rounding({tile.data(), 64, 1, 5, 48}, lost.data());
    for (int64_t i = 0; i < 5 * 64; ++i) {
      const Real rounded = convert<Real>(convert<Operand>(tile[i]));
      ASSERT_EQ(lost[i], i % 64 < 48 ? tile[i] - rounded : Real(7)) << name << ' ' << i;
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

// Keys and values with exactly the memory that they span.
TYPED_TEST(Microkernel, ProductsInPlace) {
  using Element = typename TestFixture::Element;
  using Operand = typename TestFixture::Operand;
  using Real = typename TestFixture::Real;
  for (const auto& [name, kernels] : tables<Element, Operand>()) {
    for (const int64_t rows : {0, 1, 3, 4, 9}) {
      for (const int64_t keys : {0, 1, 15, 16, 37}) {
        for (const int64_t columns : {0, 1, 15, 32, 64, 80, 161, 512}) {
          const Source<Element> matrix(
              this->template normal<Element>(Source<Element>::size(keys, columns, 1)), keys,
              columns, 1);
          const int64_t width = padded_columns(columns), stride = padded_columns(keys) + 16;
          const auto queries = this->template normal<Real>(rows * width);
          std::vector<Real> scores(rows * stride);
          kernels.dots_in_place({queries.data(), width, 1, rows, columns}, matrix.matrix,
                                scores.data(), stride);
          const auto weights = this->template normal<Real>(rows * stride);
          const auto before = this->template normal<Real>(rows * width);
          auto out = before;
          kernels.weighted_sums_in_place({weights.data(), stride, 1, rows, keys}, matrix.matrix,
                                         out.data(), width);
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t k = 0; k < keys; ++k) {
              long double sum = 0, magnitude = 0;
              for (int64_t c = 0; c < columns; ++c) {
                const long double product =
                    static_cast<long double>(queries[r * width + c]) *
                    static_cast<long double>(convert<double>(matrix.at(k, c)));
                sum += product;
                magnitude += std::fabs(product);
              }
              ASSERT_NEAR(scores[r * stride + k], sum, (columns + 2) * this->kEpsilon * magnitude)
                  << name << ' ' << rows << ' ' << keys << ' ' << columns;
            }
            for (int64_t c = 0; c < columns; ++c) {
              long double sum = before[r * width + c], magnitude = std::fabs(sum);
              for (int64_t k = 0; k < keys; ++k) {
                const long double product =
                    static_cast<long double>(weights[r * stride + k]) *
                    static_cast<long double>(convert<double>(matrix.at(k, c)));
                sum += product;
                magnitude += std::fabs(product);
              }
              ASSERT_NEAR(out[r * width + c], sum, (keys + 2) * this->kEpsilon * magnitude)
                  << name << ' ' << rows << ' ' << keys << ' ' << columns;
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
