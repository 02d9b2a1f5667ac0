#include "core/philox.h"

#include <gtest/gtest.h>

#include <bit>
#include <set>
#include <vector>

namespace flashattn {
namespace {

using Words = std::vector<uint32_t>;

template <int Rounds>
Words philox(const Words& counter, const Words& key) {
  const PhiloxCounter result =
      philox4x32<Rounds>({{counter[0], counter[1], counter[2], counter[3]}}, {{key[0], key[1]}});
  return {result.word, result.word + 4};
}

const Words kZeros4(4, 0u), kZeros2(2, 0u);
const Words kOnes4(4, 0xffffffffu), kOnes2(2, 0xffffffffu);
const Words kPi4{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
const Words kPi2{0xa4093822u, 0x299f31d0u};

// Known answers that the authors publish with Random123.
TEST(Philox, PublishedVectorsOfTenRounds) {
  EXPECT_EQ(philox<10>(kZeros4, kZeros2),
            (Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox<10>(kOnes4, kOnes2),
            (Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox<10>(kPi4, kPi2), (Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Philox, PublishedVectorsOfSevenRounds) {
  EXPECT_EQ(philox<7>(kZeros4, kZeros2),
            (Words{0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u}));
  EXPECT_EQ(philox<7>(kOnes4, kOnes2), (Words{0x5207ddc2u, 0x45165e59u, 0x4d8ee751u, 0x8c52f662u}));
  EXPECT_EQ(philox<7>(kPi4, kPi2), (Words{0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au}));
}

// Vectors of philox_vectors.py: asymmetric counters, which a swapped word would not survive.
TEST(Philox, OwnVectorsOfSevenRounds) {
  EXPECT_EQ(philox<7>({1, 2, 3, 4}, {5, 6}),
            (Words{0xcceb838bu, 0x94b8d4abu, 0x3b19758cu, 0x0e1a9304u}));
  EXPECT_EQ(philox<7>({0xdeadbeefu, 0, 0x80000000u, 0x7fffffffu}, {0x12345678u, 0x9abcdef0u}),
            (Words{0x51142e19u, 0xfecf42c2u, 0x54a9587eu, 0x42380c6au}));
  EXPECT_EQ(philox<7>({0, 0, 0, 1}, {0, 0}),
            (Words{0x2fafe778u, 0xfeafe6edu, 0xa9cfa4a0u, 0xc91c304bu}));
}

TEST(Philox, NoRoundsIsTheCounterItself) { EXPECT_EQ(philox<0>(kPi4, kPi2), kPi4); }

// A bijection of the counter: no two counters share a result.
TEST(Philox, NeighbouringCountersNeverCollide) {
  std::set<Words> seen;
  constexpr uint32_t kSide = 12;
  for (uint32_t i = 0; i < kSide * kSide * kSide; ++i) {
    seen.insert(philox<7>({i % kSide, 0, i / kSide % kSide, i / kSide / kSide}, {9, 9}));
  }
  EXPECT_EQ(seen.size(), kSide * kSide * kSide);
}

// One flipped input bit flips about half of the 128 output bits.
TEST(Philox, OneInputBitChangesHalfOfTheOutput) {
  const Words base = philox<7>(kPi4, kPi2);
  for (int bit = 0; bit < 192; ++bit) {
    Words counter = kPi4, key = kPi2;
    (bit < 128 ? counter[bit / 32] : key[bit / 32 - 4]) ^= 1u << (bit % 32);
    const Words changed = philox<7>(counter, key);
    int flipped = 0;
    for (int word = 0; word < 4; ++word) flipped += std::popcount(base[word] ^ changed[word]);
    EXPECT_GT(flipped, 64 - 32) << "input bit " << bit;
    EXPECT_LT(flipped, 64 + 32) << "input bit " << bit;
  }
}

}  // namespace
}  // namespace flashattn
