#include "core/high_product.h"

#include <gtest/gtest.h>

namespace flashattn {
namespace {

TEST(HighProduct, IsTheHighWord) {
  EXPECT_EQ(high_product(0, 0xffffffffu), 0u);
  EXPECT_EQ(high_product(1, 0xffffffffu), 0u);
  EXPECT_EQ(high_product(1u << 16, 1u << 16), 1u);
  EXPECT_EQ(high_product(0xffffffffu, 0xffffffffu), 0xfffffffeu);
  EXPECT_EQ(high_product(0xd2511f53u, 0x12345678u), 0x0ef4b3b8u);
}

}  // namespace
}  // namespace flashattn
