#include "core/dropout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <utility>

namespace flashattn {
namespace {

// The rule as semantics states it: the key is the seed's halves, the counter is the 64-bit position
// followed by (row, group), number 2w is the low half of output word w.
bool keep_by_the_rule(uint64_t seed, uint64_t offset, int64_t batch, int64_t heads_q, int64_t head,
                      int64_t row, int64_t col, uint32_t threshold) {
  const uint64_t position = offset + static_cast<uint64_t>(batch * heads_q + head);
  const auto group = static_cast<uint32_t>((col / 32) * 4 + (col / 2) % 4);
  const int64_t number = ((col / 8) % 4) * 2 + col % 2;
  const PhiloxCounter words = philox4x32<7>(
      {{static_cast<uint32_t>(position & 0xffffffffu), static_cast<uint32_t>(position >> 32),
        static_cast<uint32_t>(row), group}},
      {{static_cast<uint32_t>(seed & 0xffffffffu), static_cast<uint32_t>(seed >> 32)}});
  const uint32_t word = words.word[number / 2];
  return (number % 2 ? word >> 16 : word & 0xffffu) < threshold;
}

struct State {
  int64_t rng[2];
  Dropout dropout;

  State(int64_t seed, int64_t offset, uint32_t threshold)
      : rng{seed, offset}, dropout{rng, threshold} {}
  State(const State&) = delete;
};

// Bit j tells whether column first + j is kept.
uint32_t kept_bits(const DropoutStream& stream, int64_t row, int64_t first) {
  uint32_t bits = 0;
  for (int j = 0; j < 32; ++j) bits |= static_cast<uint32_t>(stream.keep(row, first + j)) << j;
  return bits;
}

TEST(Dropout, EachBlockOfColumnsUsesEachNumberOnce) {
  for (int64_t block = 0; block < 40; ++block) {
    std::set<std::pair<int64_t, int>> seen;
    for (int64_t col = block * 32; col < block * 32 + 32; ++col) {
      const int64_t group = dropout_group(col);
      const int slot = dropout_slot(col);
      EXPECT_GE(group, block * 4);
      EXPECT_LT(group, block * 4 + 4);
      EXPECT_GE(slot, 0);
      EXPECT_LT(slot, 8);
      seen.insert({group, slot});
    }
    EXPECT_EQ(seen.size(), 32u) << "block " << block;
  }
}

// What a thread of a tensor-core kernel relies on: the accumulator columns 8n + 2t and 8n + 2t + 1
// of thread t are slots 2n and 2n + 1 of its one group.
TEST(Dropout, AThreadOfTheAccumulatorLayoutNeedsOneCallPerBlock) {
  for (int64_t thread = 0; thread < 4; ++thread) {
    for (int64_t n = 0; n < 4; ++n) {
      for (int64_t pair = 0; pair < 2; ++pair) {
        const int64_t col = 64 + 8 * n + 2 * thread + pair;
        EXPECT_EQ(dropout_group(col), 2 * 4 + thread);
        EXPECT_EQ(dropout_slot(col), 2 * n + pair);
      }
    }
  }
}

TEST(Dropout, NumbersAreTheHalvesOfTheWordsLowFirst) {
  const DropoutNumbers numbers{{{0x22221111u, 0x44443333u, 0x66665555u, 0x88887777u}}};
  for (int slot = 0; slot < 8; ++slot) {
    EXPECT_EQ(numbers.number(slot), 0x1111u * static_cast<uint32_t>(slot + 1));
  }
}

TEST(Dropout, KeepFollowsTheRuleEverywhere) {
  for (const int64_t seed : {int64_t{0}, int64_t{-1}, int64_t{0x123456789abcdef}, INT64_MIN}) {
    for (const int64_t offset : {int64_t{0}, int64_t{0xffffffff}, int64_t{-3}, INT64_MAX}) {
      const State state(seed, offset, 40000);
      for (const int64_t head : {0, 1, 4}) {
        const DropoutStream stream = state.dropout.stream(3, 5, head);
        for (const int64_t row : {0, 1, 77, 70000}) {
          for (const int64_t first : {0, 32, 4096, 1 << 24}) {
            for (int64_t col = first; col < first + 40; ++col) {
              ASSERT_EQ(stream.keep(row, col),
                        keep_by_the_rule(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset),
                                         3, 5, head, row, col, 40000))
                  << seed << ' ' << offset << ' ' << head << ' ' << row << ' ' << col;
            }
          }
        }
      }
    }
  }
}

// Vectors of philox_vectors.py, which shares no code with the C++.
TEST(Dropout, OwnVectors) {
  EXPECT_EQ(kept_bits(State(1234567890123456789, 77, 32768).dropout.stream(1, 3, 2), 5, 0),
            0xa9fdd182u);
  EXPECT_EQ(kept_bits(State(-1, INT64_MAX - 3, 32768).dropout.stream(1, 3, 2), 70000, 96),
            0x5a20cb2du);
  EXPECT_EQ(kept_bits(State(42, -6, 32768).dropout.stream(1, 3, 2), 0, 1 << 20), 0x7bd31640u);
}

// A batch entry and a head count as one position, so a call may reserve batch * heads_q offsets.
TEST(Dropout, PositionsOfACallFollowEachOther) {
  const State state(5, 100, 32768);
  EXPECT_EQ(state.dropout.stream(0, 7, 0).position, 100u);
  EXPECT_EQ(state.dropout.stream(0, 7, 6).position, 106u);
  EXPECT_EQ(state.dropout.stream(1, 7, 0).position, 107u);
  EXPECT_EQ(kept_bits(state.dropout.stream(1, 7, 0), 3, 0),
            kept_bits(State(5, 107, 32768).dropout.stream(0, 7, 0), 3, 0));
}

TEST(Dropout, ThresholdRoundsToNearest) {
  EXPECT_EQ(Dropout::threshold_for(0.0), 65536u);
  EXPECT_EQ(Dropout::threshold_for(1.0), 0u);
  EXPECT_EQ(Dropout::threshold_for(0.5), 32768u);
  EXPECT_EQ(Dropout::threshold_for(0.1), 58982u);  // 58982.4
  EXPECT_EQ(Dropout::threshold_for(0.2), 52429u);  // 52428.8
  EXPECT_EQ(Dropout::threshold_for(0.9), 6554u);   // 6553.6
  EXPECT_EQ(Dropout::threshold_for(1e-9), 65536u);
  EXPECT_EQ(Dropout::threshold_for(1.0 - 1e-9), 0u);
  for (uint32_t level = 0; level <= kDropoutLevels; ++level) {
    const double p = 1.0 - level / 65536.0;
    ASSERT_EQ(Dropout::threshold_for(p), level);
    for (const double nudge : {-0.49, -0.25, 0.25, 0.49}) {
      const double moved = p - nudge / 65536.0;
      if (moved >= 0 && moved <= 1) {
        ASSERT_EQ(Dropout::threshold_for(moved), level) << nudge;
      }
    }
  }
}

TEST(Dropout, RateAndScaleAreExact) {
  for (const uint32_t threshold : {1u, 2u, 3u, 6554u, 32768u, 58982u, 65535u, 65536u}) {
    const State state(0, 0, threshold);
    EXPECT_EQ(state.dropout.keep_rate(), threshold / 65536.0);
    EXPECT_EQ(state.dropout.keep_scale(), 1.0 / (threshold / 65536.0));
  }
  EXPECT_EQ(State(0, 0, 0).dropout.keep_scale(), 0.0);
}

TEST(Dropout, EndsOfTheRange) {
  const State none(3, 4, 0), all(3, 4, 65536);
  for (int64_t row = 0; row < 50; ++row) {
    EXPECT_EQ(kept_bits(none.dropout.stream(0, 1, 0), row, 0), 0u);
    EXPECT_EQ(kept_bits(all.dropout.stream(0, 1, 0), row, 0), 0xffffffffu);
  }
  EXPECT_FALSE(static_cast<bool>(Dropout{}));
  EXPECT_TRUE(static_cast<bool>(all.dropout));
  EXPECT_EQ(Dropout{}.keep_scale(), 1.0);
}

// Five standard deviations of a binomial count, over all pairs and over each slot and group.
TEST(Dropout, KeepRateIsTheOneAsked) {
  constexpr int64_t kRows = 256, kCols = 256;
  for (const double p : {0.01, 0.1, 0.3, 0.5, 0.9, 0.99}) {
    const State state(2024, 6, Dropout::threshold_for(p));
    const DropoutStream stream = state.dropout.stream(2, 4, 1);
    int64_t kept = 0, kept_of_class[32] = {};
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t col = 0; col < kCols; ++col) {
        const bool keep = stream.keep(row, col);
        kept += keep;
        kept_of_class[col % 32] += keep;
      }
    }
    const double rate = state.dropout.keep_rate();
    const auto expect_near = [&](int64_t count, double trials) {
      EXPECT_NEAR(count, rate * trials, 5 * std::sqrt(trials * rate * (1 - rate))) << "p = " << p;
    };
    expect_near(kept, kRows * kCols);
    for (const int64_t count : kept_of_class) expect_near(count, kRows * kCols / 32);
  }
}

// Neighbours in every direction agree as often as independent bits do.
TEST(Dropout, NeighboursAreIndependent) {
  const State state(99, 0, 32768);
  constexpr int64_t kRows = 128;
  int64_t next_row = 0, next_col = 0, next_head = 0, next_batch = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const uint32_t here = kept_bits(state.dropout.stream(0, 2, 0), row, 0);
    const auto agreements = [&](uint32_t other) { return 32 - __builtin_popcount(here ^ other); };
    next_row += agreements(kept_bits(state.dropout.stream(0, 2, 0), row + 1, 0));
    next_col += agreements(kept_bits(state.dropout.stream(0, 2, 0), row, 1));
    next_head += agreements(kept_bits(state.dropout.stream(0, 2, 1), row, 0));
    next_batch += agreements(kept_bits(state.dropout.stream(1, 2, 0), row, 0));
  }
  for (const int64_t count : {next_row, next_col, next_head, next_batch}) {
    EXPECT_NEAR(count, kRows * 16, 5 * std::sqrt(kRows * 8.0));
  }
}

}  // namespace
}  // namespace flashattn
