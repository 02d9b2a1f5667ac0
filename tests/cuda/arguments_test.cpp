#include "cuda/flash/arguments.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace flashattn::cuda {
namespace {

TEST(ForwardTask, TakesBlocksApart) {
  ForwardArguments a{};
  a.splits = Divisor(3);
  a.value_parts = Divisor(2);
  a.heads = Divisor(5);
  constexpr int kBatch = 4, kParts = 7;
  a.order = BlockOrder(kParts, kBatch * 5 * 2 * 3, 9);
  std::set<std::tuple<int, int, int, int, int>> seen;
  for (int block = 0; block < a.order.blocks(); ++block) {
    const ForwardTask task = a.task<64, 32>(block);
    ASSERT_TRUE(task.batch >= 0 && task.batch < kBatch && task.head >= 0 && task.head < 5);
    ASSERT_TRUE(task.row % 64 == 0 && task.row >= 0 && task.row < kParts * 64);
    ASSERT_TRUE(task.value_column == 0 || task.value_column == 32);
    ASSERT_TRUE(task.split >= 0 && task.split < 3);
    ASSERT_TRUE(
        seen.insert({task.batch, task.head, task.row, task.value_column, task.split}).second);
  }
}

}  // namespace
}  // namespace flashattn::cuda
