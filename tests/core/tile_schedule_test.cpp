#include "core/tile_schedule.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace flashattn {
namespace {

TEST(DivideUp, RoundsUp) {
  EXPECT_EQ(divide_up(0, 4), 0);
  EXPECT_EQ(divide_up(1, 4), 1);
  EXPECT_EQ(divide_up(4, 4), 1);
  EXPECT_EQ(divide_up(5, 4), 2);
  EXPECT_EQ(divide_up((int64_t{1} << 40) + 1, 2), (int64_t{1} << 39) + 1);
}

// The tiles follow each other without gap or overlap, none is empty, only the last may be short.
TEST(Tiles, CoverTheirRangeExactly) {
  for (int64_t begin = 0; begin < 12; ++begin) {
    for (int64_t end = 0; end < 30; ++end) {
      for (int64_t tile = 1; tile < 9; ++tile) {
        const Tiles tiles{{begin, end}, tile};
        int64_t at = begin;
        for (int64_t i = 0; i < tiles.count(); ++i) {
          const Range range = tiles[i];
          ASSERT_EQ(range.begin, at);
          ASSERT_GT(range.size(), 0);
          ASSERT_LE(range.size(), tile);
          if (i + 1 < tiles.count()) {
            ASSERT_EQ(range.size(), tile);
          }
          at = range.end;
        }
        ASSERT_EQ(at, end > begin ? end : begin);
      }
    }
  }
}

TEST(AlignedTiles, CoverTheRangeFromAMultipleOfTheTile) {
  for (int64_t begin = 0; begin < 20; ++begin) {
    for (int64_t end = 0; end < 30; ++end) {
      for (int64_t tile = 1; tile < 9; ++tile) {
        const Tiles tiles = aligned_tiles({begin, end}, tile);
        if (begin >= end) {
          ASSERT_EQ(tiles.count(), 0);
          continue;
        }
        ASSERT_GT(tiles.count(), 0);
        ASSERT_LE(tiles[0].begin, begin);
        ASSERT_GT(tiles[0].end, begin);  // the first tile is needed
        ASSERT_EQ(tiles[tiles.count() - 1].end, end);
        for (int64_t i = 0; i < tiles.count(); ++i) ASSERT_EQ(tiles[i].begin % tile, 0);
      }
    }
  }
}

TEST(TaskGrid, IsABijectionWithThePartFastest) {
  for (int64_t batch = 0; batch < 4; ++batch) {
    for (int64_t heads = 0; heads < 5; ++heads) {
      for (int64_t parts = 0; parts < 6; ++parts) {
        const TaskGrid grid{batch, heads, parts};
        std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
        for (int64_t i = 0; i < grid.count(); ++i) {
          const Task task = grid[i];
          ASSERT_EQ((task.batch * heads + task.head) * parts + task.part, i);
          ASSERT_TRUE(task.batch >= 0 && task.batch < batch);
          ASSERT_TRUE(task.head >= 0 && task.head < heads);
          ASSERT_TRUE(task.part >= 0 && task.part < parts);
          seen.insert({task.batch, task.head, task.part});
        }
        ASSERT_EQ(static_cast<int64_t>(seen.size()), batch * heads * parts);
      }
    }
  }
}

TEST(TaskGrid, CountsPastThirtyTwoBits) {
  const TaskGrid grid{70000, 70000, 3};
  EXPECT_EQ(grid.count(), int64_t{70000} * 70000 * 3);
  const Task last = grid[grid.count() - 1];
  EXPECT_EQ(last.batch, 69999);
  EXPECT_EQ(last.head, 69999);
  EXPECT_EQ(last.part, 2);
}

}  // namespace
}  // namespace flashattn
