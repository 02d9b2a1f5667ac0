#include "cpu/scratch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>
#include <utility>

namespace flashattn::cpu {
namespace {

TEST(Buffer, IsAlignedToACacheLine) {
  for (const int64_t count : {1, 3, 16, 1000}) {
    const Buffer<float> buffer(count);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    for (int64_t i = 0; i < count; ++i) buffer[i] = 1;
  }
}

TEST(Buffer, ZeroWhereAsked) {
  const Buffer<double> buffer(1000, Buffer<double>::Fill::zero);
  for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(buffer[i], 0.0);
}

TEST(Buffer, EmptyOwnsNothing) {
  EXPECT_FALSE(static_cast<bool>(Buffer<float>()));
  EXPECT_FALSE(static_cast<bool>(Buffer<float>(0)));
  EXPECT_FALSE(static_cast<bool>(Buffer<float>(-5)));
}

TEST(Buffer, MovesItsMemory) {
  Buffer<int> first(4);
  first[3] = 7;
  const Buffer<int> second = std::move(first);
  EXPECT_EQ(second[3], 7);
}

}  // namespace
}  // namespace flashattn::cpu
