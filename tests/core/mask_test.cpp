#include "core/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace flashattn {
namespace {

// Visibility as semantics words it, one condition after the other.
bool visible_by_the_rule(const MaskRule& rule, int64_t len_q, int64_t len_k, int64_t i, int64_t j) {
  const int64_t shift = rule.alignment == Alignment::top_left ? 0 : len_k - len_q;
  if (j < 0 || j >= len_k) return false;
  if (rule.causal && j > i + shift) return false;
  if (rule.window_left != kUnlimited && j < i + shift - rule.window_left) return false;
  if (rule.window_right != kUnlimited && j > i + shift + rule.window_right) return false;
  return true;
}

std::string describe(const MaskRule& rule, int64_t len_q, int64_t len_k) {
  return "len_q " + std::to_string(len_q) + " len_k " + std::to_string(len_k) +
         (rule.causal ? " causal" : "") + " window (" + std::to_string(rule.window_left) + ", " +
         std::to_string(rule.window_right) + ")" +
         (rule.alignment == Alignment::top_left ? " top_left" : " bottom_right");
}

// Every mask over small lengths, both windows from 0 past the longest length and unlimited.
template <class Body>
void for_every_mask(const Body& body) {
  constexpr int64_t kLongest = 7;
  std::vector<int64_t> windows{kUnlimited};
  for (int64_t w = 0; w <= kLongest + 1; ++w) windows.push_back(w);
  for (int64_t len_q = 0; len_q <= kLongest; ++len_q) {
    for (int64_t len_k = 0; len_k <= kLongest; ++len_k) {
      for (const bool causal : {false, true}) {
        for (const int64_t left : windows) {
          for (const int64_t right : windows) {
            for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
              const MaskRule rule{causal, left, right, alignment};
              body(rule, rule.for_sequence(len_q, len_k));
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Every tile [begin, end) of 1 to 4 positions that has a position inside [0, length).
std::vector<Range> tiles_of(int64_t length) {
  std::vector<Range> tiles;
  for (int64_t size = 1; size <= 4; ++size) {
    for (int64_t begin = 0; begin < length; ++begin) {
      tiles.push_back({begin, std::min(begin + size, length)});
    }
  }
  return tiles;
}

TEST(Mask, VisibleFollowsTheRule) {
  for_every_mask([](const MaskRule& rule, const SequenceMask& mask) {
    for (int64_t i = 0; i < mask.len_q; ++i) {
      for (int64_t j = -2; j < mask.len_k + 2; ++j) {
        ASSERT_EQ(mask.visible(i, j), visible_by_the_rule(rule, mask.len_q, mask.len_k, i, j))
            << describe(rule, mask.len_q, mask.len_k) << " pair " << i << ", " << j;
      }
    }
  });
}

// CUDA kernels count in 32 bits.
TEST(Mask, PositionsOf32BitsSeeTheSame) {
  for_every_mask([](const MaskRule& rule, const SequenceMask& mask) {
    const int len_q = static_cast<int>(mask.len_q), len_k = static_cast<int>(mask.len_k);
    const SequenceMaskOf<int> narrow = rule.for_sequence<int>(len_q, len_k);
    for (int i = 0; i < len_q; ++i) {
      for (int j = -2; j < len_k + 2; ++j) ASSERT_EQ(narrow.visible(i, j), mask.visible(i, j));
      ASSERT_EQ(narrow.keys_for({i, i + 1}).end, mask.keys_for({i, i + 1}).end);
      ASSERT_EQ(narrow.keys_for_all({i, len_q}).begin, mask.keys_for_all({i, len_q}).begin);
    }
  });
}

// Tight at both ends: the first and the last key of the range are seen, and none outside it is.
TEST(Mask, KeysForIsExactlyTheSpanOfVisibleKeys) {
  for_every_mask([](const MaskRule& rule, const SequenceMask& mask) {
    for (const Range rows : tiles_of(mask.len_q)) {
      Range expected{0, 0};
      for (int64_t j = mask.len_k - 1; j >= 0; --j) {
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          if (!mask.visible(i, j)) continue;
          if (expected.empty()) expected.end = j + 1;
          expected.begin = j;
        }
      }
      const Range keys = mask.keys_for(rows);
      ASSERT_TRUE(keys.begin == expected.begin && keys.end == expected.end)
          << describe(rule, mask.len_q, mask.len_k) << " rows [" << rows.begin << ", " << rows.end
          << ") keys [" << keys.begin << ", " << keys.end << ") instead of [" << expected.begin
          << ", " << expected.end << ")";
    }
  });
}

TEST(Mask, QueriesForIsExactlyTheSpanOfSeeingQueries) {
  for_every_mask([](const MaskRule& rule, const SequenceMask& mask) {
    for (const Range keys : tiles_of(mask.len_k)) {
      Range expected{0, 0};
      for (int64_t i = mask.len_q - 1; i >= 0; --i) {
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          if (!mask.visible(i, j)) continue;
          if (expected.empty()) expected.end = i + 1;
          expected.begin = i;
        }
      }
      const Range rows = mask.queries_for(keys);
      ASSERT_TRUE(rows.begin == expected.begin && rows.end == expected.end)
          << describe(rule, mask.len_q, mask.len_k) << " keys [" << keys.begin << ", " << keys.end
          << ") rows [" << rows.begin << ", " << rows.end << ") instead of [" << expected.begin
          << ", " << expected.end << ")";
    }
  });
}

TEST(Mask, AllVisibleIsExactlyThat) {
  for_every_mask([](const MaskRule& rule, const SequenceMask& mask) {
    for (const Range rows : tiles_of(mask.len_q)) {
      for (const Range keys : tiles_of(mask.len_k)) {
        bool expected = true;
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          for (int64_t j = keys.begin; j < keys.end; ++j) expected &= mask.visible(i, j);
        }
        ASSERT_EQ(mask.all_visible(rows, keys), expected)
            << describe(rule, mask.len_q, mask.len_k) << " rows [" << rows.begin << ", " << rows.end
            << ") keys [" << keys.begin << ", " << keys.end << ")";
      }
    }
  });
}

// A tile that hangs over the end of the keys needs its mask; one that hangs over the end of the
// rows may still lose keys to no row.
TEST(Mask, TilesThatHangOverTheEnd) {
  const SequenceMask mask = MaskRule{}.for_sequence(5, 6);
  EXPECT_FALSE(mask.all_visible({0, 4}, {4, 8}));
  EXPECT_TRUE(mask.all_visible({4, 8}, {0, 4}));
  const SequenceMask causal = MaskRule{.causal = true}.for_sequence(5, 6);
  EXPECT_EQ(causal.keys_for({4, 8}).end, 6);
  EXPECT_EQ(causal.queries_for({4, 8}).begin, 4);
  EXPECT_EQ(causal.queries_for({4, 8}).end, 5);
}

TEST(Mask, EmptyTilesSeeNothing) {
  const SequenceMask mask = MaskRule{}.for_sequence(4, 4);
  EXPECT_TRUE(mask.keys_for({2, 2}).empty());
  EXPECT_TRUE(mask.keys_for({3, 1}).empty());
  EXPECT_TRUE(mask.queries_for({2, 2}).empty());
  EXPECT_EQ(mask.keys_for({2, 2}).size(), 0);
  EXPECT_EQ((Range{5, 2}).size(), 0);
}

TEST(Mask, OneRuleFitsSequencesOfEveryLength) {
  const MaskRule rule{.causal = true, .alignment = Alignment::bottom_right};
  EXPECT_EQ(rule.for_sequence(3, 10).shift, 7);
  EXPECT_EQ(rule.for_sequence(10, 3).shift, -7);
  EXPECT_TRUE(rule.for_sequence(10, 3).keys_for({0, 7}).empty());
  EXPECT_EQ(rule.for_sequence(10, 3).queries_for({0, 3}).begin, 7);
}

// Callers write "no limit" in many ways; none may overflow, at any length.
TEST(Mask, HugeWindowsAndLengthsDoNotOverflow) {
  constexpr int64_t kHugeLength = int64_t{1} << 40;
  for (const int64_t huge :
       {INT64_MAX, INT64_MAX - 1, kUnlimited + 1, kUnlimited, kUnlimited - 1, int64_t{1} << 50}) {
    for (const Alignment alignment : {Alignment::top_left, Alignment::bottom_right}) {
      for (const int64_t len_q : {int64_t{3}, kHugeLength}) {
        for (const int64_t len_k : {int64_t{3}, kHugeLength}) {
          const SequenceMask mask =
              MaskRule{false, huge, huge, alignment}.for_sequence(len_q, len_k);
          EXPECT_TRUE(mask.visible(0, len_k - 1));
          EXPECT_TRUE(mask.visible(len_q - 1, 0));
          EXPECT_FALSE(mask.visible(0, len_k));
          EXPECT_EQ(mask.keys_for({0, 1}).size(), len_k);
          EXPECT_EQ(mask.queries_for({len_k - 1, len_k}).size(), len_q);
          EXPECT_TRUE(mask.all_visible({0, len_q}, {0, len_k}));
        }
      }
    }
  }
  const SequenceMask causal =
      MaskRule{.causal = true, .window_left = INT64_MAX}.for_sequence(kHugeLength, kHugeLength);
  EXPECT_TRUE(causal.visible(kHugeLength - 1, 0));
  EXPECT_FALSE(causal.visible(0, 1));
}

}  // namespace
}  // namespace flashattn
