#include "core/sequences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <vector>

namespace flashattn {
namespace {

template <class Integer>
IntegerList list_of(const std::vector<Integer>& numbers, int64_t stride = 1) {
  IntegerList list;
  if constexpr (sizeof(Integer) == 8) {
    list.as_int64 = numbers.data();
  } else {
    list.as_int32 = numbers.data();
  }
  list.stride = stride;
  return list;
}

Sequences dense_of(int64_t count, int64_t len_q, int64_t len_k) {
  Sequences dense;
  dense.count = count;
  dense.storage_q = dense.max_len_q = len_q;
  dense.storage_k = dense.max_len_k = len_k;
  return dense;
}

// Packed sequences whose longest is as long as the storage, until a test says otherwise.
template <class Integer>
Sequences packed_of(const std::vector<Integer>& cu_q, const std::vector<Integer>& cu_k,
                    int64_t total_q, int64_t total_k) {
  Sequences packed = dense_of(static_cast<int64_t>(cu_q.size()) - 1, total_q, total_k);
  packed.cu_q = list_of(cu_q);
  packed.cu_k = list_of(cu_k);
  return packed;
}

std::array<int64_t, 4> fields(const Sequence& sequence) {
  return {sequence.q_begin, sequence.len_q, sequence.k_begin, sequence.len_k};
}
using Fields = std::array<int64_t, 4>;

TEST(IntegerList, ReadsBothWidthsWithAnyStride) {
  const std::vector<int32_t> narrow{5, -1, 7, -1, INT32_MIN};
  const std::vector<int64_t> wide{int64_t{1} << 40, 0, -9, 0, 3};
  EXPECT_EQ(list_of(narrow)[2], 7);
  EXPECT_EQ(list_of(narrow, 2)[1], 7);
  EXPECT_EQ(list_of(narrow, 2)[2], INT32_MIN);
  EXPECT_EQ(list_of(narrow, 0)[4], 5);
  EXPECT_EQ(list_of(wide)[0], int64_t{1} << 40);
  EXPECT_EQ(list_of(wide, 2)[1], -9);
  EXPECT_EQ(list_of(wide, 2)[2], 3);
  EXPECT_TRUE(static_cast<bool>(list_of(narrow)));
  EXPECT_TRUE(static_cast<bool>(list_of(wide)));
  EXPECT_FALSE(static_cast<bool>(IntegerList{}));
}

TEST(Sequences, DenseUsesTheWholeStorage) {
  const Sequences dense = dense_of(3, 5, 9);
  EXPECT_FALSE(dense.packed());
  for (int64_t b = 0; b < 3; ++b) EXPECT_EQ(fields(dense[b]), (Fields{0, 5, 0, 9}));
}

TEST(Sequences, KeyLengthsShortenKeysOnlyAndAreClamped) {
  const std::vector<int64_t> lengths{4, 0, 9, 10, INT64_MAX, -1, INT64_MIN};
  Sequences dense = dense_of(7, 5, 9);
  dense.key_lengths = list_of(lengths);
  const std::vector<int64_t> expected{4, 0, 9, 9, 9, 0, 0};
  for (int64_t b = 0; b < 7; ++b) {
    EXPECT_EQ(fields(dense[b]), (Fields{0, 5, 0, expected[static_cast<size_t>(b)]}));
  }
}

template <class Integer>
class PackedSequences : public testing::Test {};
using Widths = testing::Types<int32_t, int64_t>;
TYPED_TEST_SUITE(PackedSequences, Widths);

TYPED_TEST(PackedSequences, OffsetsGiveBeginAndLength) {
  const std::vector<TypeParam> cu_q{0, 3, 3, 10}, cu_k{0, 1, 8, 8};
  const Sequences packed = packed_of(cu_q, cu_k, 12, 8);
  EXPECT_TRUE(packed.packed());
  EXPECT_EQ(fields(packed[0]), (Fields{0, 3, 0, 1}));
  EXPECT_EQ(fields(packed[1]), (Fields{3, 0, 1, 7}));
  EXPECT_EQ(fields(packed[2]), (Fields{3, 7, 8, 0}));
}

TYPED_TEST(PackedSequences, UsedLengthsShortenASegment) {
  const std::vector<TypeParam> cu{0, 4, 8, 12}, used_q{2, 9, -1}, used_k{0, 4, 3};
  Sequences packed = packed_of(cu, cu, 12, 12);
  packed.used_q = list_of(used_q);
  packed.used_k = list_of(used_k);
  EXPECT_EQ(fields(packed[0]), (Fields{0, 2, 0, 0}));
  EXPECT_EQ(fields(packed[1]), (Fields{4, 4, 4, 4}));
  EXPECT_EQ(fields(packed[2]), (Fields{8, 0, 8, 3}));
}

TYPED_TEST(PackedSequences, ALengthNeverPassesTheStatedMaximum) {
  const std::vector<TypeParam> cu{0, 6, 8};
  Sequences packed = packed_of(cu, cu, 8, 8);
  packed.max_len_q = 4;
  packed.max_len_k = 0;
  EXPECT_EQ(fields(packed[0]), (Fields{0, 4, 0, 0}));
  EXPECT_EQ(fields(packed[1]), (Fields{6, 2, 6, 0}));
}

// Whatever the lists hold, nothing outside the storage is reached and no length is negative.
TYPED_TEST(PackedSequences, NonsenseNeverLeavesTheStorage) {
  std::mt19937_64 random(11);
  const auto nonsense = [&] {
    constexpr TypeParam kLimits[] = {std::numeric_limits<TypeParam>::min(),
                                     std::numeric_limits<TypeParam>::max(), -1, 0, 1};
    const uint64_t choice = random() % 8;
    if (choice < 5) return kLimits[choice];
    return static_cast<TypeParam>(static_cast<int64_t>(random() % 40) - 10);
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<TypeParam> cu_q(6), cu_k(6), used_q(5), used_k(5);
    for (auto* list : {&cu_q, &cu_k, &used_q, &used_k}) {
      for (TypeParam& number : *list) number = nonsense();
    }
    Sequences packed = packed_of(cu_q, cu_k, static_cast<int64_t>(random() % 20),
                                 static_cast<int64_t>(random() % 20));
    packed.max_len_q = static_cast<int64_t>(random() % 25) - 2;
    packed.max_len_k = static_cast<int64_t>(random() % 25) - 2;
    if (round % 2) packed.used_q = list_of(used_q);
    if (round % 3) packed.used_k = list_of(used_k);
    for (int64_t s = 0; s < 5; ++s) {
      const Sequence sequence = packed[s];
      ASSERT_GE(sequence.q_begin, 0);
      ASSERT_GE(sequence.len_q, 0);
      ASSERT_LE(sequence.q_begin + sequence.len_q, packed.storage_q);
      ASSERT_LE(sequence.len_q, std::max<int64_t>(packed.max_len_q, 0));
      ASSERT_GE(sequence.k_begin, 0);
      ASSERT_GE(sequence.len_k, 0);
      ASSERT_LE(sequence.k_begin + sequence.len_k, packed.storage_k);
      ASSERT_LE(sequence.len_k, std::max<int64_t>(packed.max_len_k, 0));
    }
  }
}

TEST(Sequences, OffsetsBeyondThirtyTwoBits) {
  const std::vector<int64_t> cu{0, int64_t{1} << 33, (int64_t{1} << 33) + 5};
  const Sequences packed = packed_of(cu, cu, cu.back(), cu.back());
  EXPECT_EQ(fields(packed[1]), (Fields{cu[1], 5, cu[1], 5}));
}

}  // namespace
}  // namespace flashattn
