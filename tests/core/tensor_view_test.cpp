#include "core/tensor_view.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace flashattn {
namespace {

std::vector<int> numbers(int count) {
  std::vector<int> result(count);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

TEST(TensorView, StridesMayBeAnyOrder) {
  std::vector<int> data = numbers(24);
  const TensorView<int, 3> contiguous{data.data(), {2, 3, 4}, {12, 4, 1}};
  const TensorView<int, 3> transposed{data.data(), {4, 3, 2}, {1, 4, 12}};
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 4; ++k) {
        EXPECT_EQ(*contiguous.at(i, j, k), 12 * i + 4 * j + k);
        EXPECT_EQ(transposed.at(k, j, i), contiguous.at(i, j, k));
      }
    }
  }
}

TEST(TensorView, ExpandedAndReversedDimensions) {
  std::vector<int> data = numbers(6);
  const TensorView<int, 2> expanded{data.data(), {5, 3}, {0, 1}};
  EXPECT_EQ(expanded.at(0, 2), expanded.at(4, 2));
  const TensorView<int, 2> reversed{data.data() + 5, {2, 3}, {-3, -1}};
  EXPECT_EQ(*reversed.at(0, 0), 5);
  EXPECT_EQ(*reversed.at(1, 2), 0);
}

TEST(TensorView, FewerIndicesPointAtTheStartOfASlice) {
  std::vector<int> data = numbers(24);
  const TensorView<int, 3> view{data.data(), {2, 3, 4}, {12, 4, 1}};
  EXPECT_EQ(*view.at(1), 12);
  EXPECT_EQ(*view.at(1, 2), 20);
}

// 64-bit arithmetic even when the indices are 32-bit: offsets compared as integers, nothing is
// read.
TEST(TensorView, OffsetsBeyondThirtyTwoBits) {
  const TensorView<char, 2> view{reinterpret_cast<char*>(0x10000), {100000, 100000}, {100000, 1}};
  const int row = 99999, col = 7;
  EXPECT_EQ(reinterpret_cast<intptr_t>(view.at(row, col)), 0x10000 + int64_t{99999} * 100000 + 7);
}

TEST(TensorView, AbsentHasNoStorage) {
  EXPECT_FALSE(static_cast<bool>(TensorView<float, 2>{}));
  EXPECT_FALSE(static_cast<bool>(UntypedView4{}));
  float one = 1;
  EXPECT_TRUE(static_cast<bool>(TensorView<float, 1>{&one, {1}, {1}}));
}

TEST(UntypedView4, BecomesATypedViewOfTheSameElements) {
  std::vector<double> data(120);
  const UntypedView4 untyped{data.data(), {2, 3, 4, 5}, {60, 20, 5, 1}};
  const TensorView<const double, 4> view = untyped.as<const double>();
  for (int d = 0; d < 4; ++d) {
    EXPECT_EQ(view.size[d], untyped.size[d]);
    EXPECT_EQ(view.stride[d], untyped.stride[d]);
  }
  EXPECT_EQ(view.at(1, 2, 3, 4), data.data() + 119);
}

}  // namespace
}  // namespace flashattn
