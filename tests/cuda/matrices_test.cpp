// Views as matrices of a BLAS: what can be read in place, and how many calls a product takes.
#include "cuda/naive/matrices.h"

#include <gtest/gtest.h>

namespace flashattn::cuda::naive {
namespace {

UntypedView4 view_of(const int64_t (&size)[4], const int64_t (&stride)[4]) {
  UntypedView4 view;
  for (int d = 0; d < 4; ++d) {
    view.size[d] = size[d];
    view.stride[d] = stride[d];
  }
  return view;
}

void expect_layout(const UntypedView4& view, bool row_major, int64_t leading) {
  const auto layout = layout_of(view);
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->row_major, row_major);
  EXPECT_EQ(layout->leading, leading);
}

TEST(LayoutOf, BothOrdersAndTheirTransposes) {
  const UntypedView4 rows = view_of({2, 3, 5, 7}, {0, 0, 11, 1});
  const UntypedView4 columns = view_of({2, 3, 5, 7}, {0, 0, 1, 13});
  expect_layout(rows, true, 11);
  expect_layout(transposed(rows), false, 11);
  expect_layout(columns, false, 13);
  expect_layout(transposed(columns), true, 13);
}

TEST(LayoutOf, StridesOfOneRowOrColumnMeanNothing) {
  expect_layout(view_of({1, 1, 1, 7}, {0, 0, 0, 1}), true, 7);
  expect_layout(view_of({1, 1, 5, 1}, {0, 0, 9, 0}), true, 9);
  expect_layout(view_of({1, 1, 5, 1}, {0, 0, 1, 0}), true, 1);
  expect_layout(view_of({1, 1, 1, 1}, {0, 0, 0, 0}), true, 1);
  expect_layout(view_of({1, 1, 1, 7}, {0, 0, 3, 4}), false, 4);
}

TEST(LayoutOf, NothingForOverlapsAndTwoStrides) {
  EXPECT_FALSE(layout_of(view_of({1, 1, 5, 7}, {0, 0, 14, 2})));
  EXPECT_FALSE(layout_of(view_of({1, 1, 5, 7}, {0, 0, 0, 1})));  // expanded rows
  EXPECT_FALSE(layout_of(view_of({1, 1, 5, 7}, {0, 0, 1, 0})));  // expanded columns
  EXPECT_FALSE(layout_of(view_of({1, 1, 5, 7}, {0, 0, 6, 1})));
}

TEST(Grouped, HeadsOneBelowAnother) {
  const auto matrices = grouped(view_of({2, 6, 5, 7}, {210, 35, 7, 1}), 3);
  ASSERT_TRUE(matrices);
  EXPECT_EQ(matrices->size[1], 2);
  EXPECT_EQ(matrices->size[2], 15);
  EXPECT_EQ(matrices->stride[1], 105);
  EXPECT_EQ(matrices->stride[2], 7);
  // (batch, length, heads, head_dim) in memory: only a single row each, or no group, will do.
  EXPECT_FALSE(grouped(view_of({2, 6, 5, 7}, {210, 7, 42, 1}), 3));
  EXPECT_TRUE(grouped(view_of({2, 6, 5, 7}, {210, 7, 42, 1}), 1));
  const auto one_row = grouped(view_of({2, 6, 1, 7}, {42, 7, 42, 1}), 3);
  ASSERT_TRUE(one_row);
  EXPECT_EQ(one_row->stride[2], 7);
  EXPECT_EQ(one_row->stride[1], 21);
}

TEST(RunsOf, OneRunWhereBatchAndHeadsAreEvenlySpaced) {
  const UntypedView4 even = view_of({2, 3, 5, 7}, {105, 35, 7, 1});
  const UntypedView4 uneven = view_of({2, 3, 5, 7}, {105, 7, 21, 1});
  const MatrixRuns one = runs_of(even, even, even);
  EXPECT_EQ(one.runs, 1);
  EXPECT_EQ(one.count, 6);
  EXPECT_EQ(one.inner, 1);
  const MatrixRuns two = runs_of(even, uneven, even);
  EXPECT_EQ(two.runs, 2);
  EXPECT_EQ(two.count, 3);
  const UntypedView4 many = view_of({9, 3, 5, 7}, {105, 7, 21, 1});
  const MatrixRuns three = runs_of(many, many, many);
  EXPECT_EQ(three.runs, 3);
  EXPECT_EQ(three.count, 9);
  EXPECT_EQ(three.outer, 1);
  const UntypedView4 one_head = view_of({9, 1, 5, 7}, {35, 0, 7, 1});
  EXPECT_EQ(runs_of(one_head, one_head, one_head).count, 9);
}

TEST(ContiguousView, SizesOfZeroKeepStridesApart) {
  const UntypedView4 view = contiguous_view(nullptr, {2, 0, 3, 4});
  EXPECT_EQ(elements_of(view), 0);
  EXPECT_EQ(view.stride[2], 4);
  EXPECT_EQ(view.stride[0], 12);
}

}  // namespace
}  // namespace flashattn::cuda::naive
