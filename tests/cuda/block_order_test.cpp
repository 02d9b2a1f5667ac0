#include "cuda/flash/block_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace flashattn::cuda {
namespace {

// Every tile of every head once; a section of heads ends before the next one begins, and goes
// through its tiles in order.
void expect_order(int64_t parts, int64_t heads, int64_t sections) {
  const BlockOrder order(parts, heads, sections);
  ASSERT_EQ(order.blocks(), parts * heads);
  ASSERT_EQ(order.parts(), parts);
  const int64_t section = divide_up(heads, sections);
  std::set<std::pair<int, int>> seen;
  BlockOrder::Place before{0, 0};
  for (int block = 0; block < order.blocks(); ++block) {
    const BlockOrder::Place place = order[block];
    ASSERT_TRUE(place.head >= 0 && place.head < heads && place.part >= 0 && place.part < parts);
    ASSERT_TRUE(seen.insert({place.head, place.part}).second);
    ASSERT_GE(place.head / section, before.head / section);
    if (place.head / section == before.head / section) {
      ASSERT_GE(place.part, before.part);
    } else {
      ASSERT_EQ(place.part, 0);
    }
    before = place;
  }
}

TEST(BlockOrder, EveryTileOnceSectionBySection) {
  for (const int parts : {1, 2, 3, 7, 64}) {
    for (const int heads : {1, 2, 5, 16, 31}) {
      for (const int sections : {1, 2, 3, 8, 31}) expect_order(parts, heads, sections);
    }
  }
}

TEST(BlockOrder, SectionsOfOneHeadGoTileByTile) {
  const BlockOrder order(3, 2, 2);
  for (int block = 0; block < 6; ++block) {
    EXPECT_EQ(order[block].head, block / 3);
    EXPECT_EQ(order[block].part, block % 3);
  }
}

TEST(BlockOrder, OneSectionGoesHeadByHead) {
  const BlockOrder order(3, 2, 1);
  for (int block = 0; block < 6; ++block) {
    EXPECT_EQ(order[block].head, block % 2);
    EXPECT_EQ(order[block].part, block / 2);
  }
}

TEST(BlockOrder, NothingIsNoBlocks) {
  EXPECT_EQ(BlockOrder(0, 4, 1).blocks(), 0);
  EXPECT_EQ(BlockOrder(4, 0, 1).blocks(), 0);
  EXPECT_EQ(BlockOrder().blocks(), 0);
}

}  // namespace
}  // namespace flashattn::cuda
