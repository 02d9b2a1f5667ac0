#include "cpu/pack.h"

#include <gtest/gtest.h>

#include <vector>

namespace flashattn::cpu {
namespace {

// A strided matrix with exactly the memory it spans.
struct Source {
  std::vector<float16> data;
  StridedMatrix<const float16> matrix;

  Source(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    const bool empty = rows == 0 || columns == 0;
    data.resize(static_cast<size_t>(
        empty ? 0 : (rows - 1) * row_stride + (columns - 1) * column_stride + 1));
    for (size_t i = 0; i < data.size(); ++i) data[i] = float16(static_cast<float>(i % 1000));
    matrix = {data.data(), row_stride, column_stride, rows, columns};
  }
  float at(int64_t r, int64_t c) const {
    return static_cast<float>(
        data[static_cast<size_t>(r * matrix.row_stride + c * matrix.column_stride)]);
  }
};

template <class Body>
void for_every_shape(const Body& body) {
  for (const int64_t rows : {0, 1, 15, 16, 17, 40}) {
    for (const int64_t columns : {0, 1, 16, 19, 33}) {
      body(Source(rows, columns, columns + 2, 1));  // rows with a gap
      body(Source(rows, columns, 1, rows + 1));     // transposed
      body(Source(rows, columns, 2 * columns, 2));  // every other element
      body(Source(rows, columns, 0, 1));            // one row, expanded
    }
  }
}

TEST(Pack, RowsArePaddedWithZero) {
  for_every_shape([](const Source& source) {
    const auto [data, row_stride, column_stride, rows, columns] = source.matrix;
    const int64_t stride = padded_columns(columns);
    std::vector<float> packed(static_cast<size_t>(rows * stride), -1.0f);
    pack(source.matrix, packed.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        ASSERT_EQ(packed[r * stride + c], c < columns ? source.at(r, c) : 0.0f);
      }
    }
  });
}

TEST(Pack, TransposedColumnsArePaddedWithZero) {
  for_every_shape([](const Source& source) {
    const auto [data, row_stride, column_stride, rows, columns] = source.matrix;
    const int64_t stride = padded_columns(rows);
    std::vector<float> packed(static_cast<size_t>(columns * stride), -1.0f);
    pack_transposed(source.matrix, packed.data());
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < stride; ++r) {
        ASSERT_EQ(packed[c * stride + r], r < rows ? source.at(r, c) : 0.0f);
      }
    }
  });
}

TEST(Pack, StoreRowScalesAndStrides) {
  const float from[] = {1, 2, 3};
  std::vector<bfloat16> to(5, bfloat16(-1.0f));
  store_row(from, 3, 0.5f, to.data(), 2);
  const float expected[] = {0.5f, -1, 1, -1, 1.5f};
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(static_cast<float>(to[i]), expected[i]);
}

}  // namespace
}  // namespace flashattn::cpu
