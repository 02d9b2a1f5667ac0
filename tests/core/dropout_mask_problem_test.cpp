#include "core/dropout_mask_problem.h"

#include <gtest/gtest.h>

namespace flashattn {
namespace {

// A block written at once holds the decision of each of its pairs.
TEST(DropoutBlock, AgreesWithKeepForEveryColumn) {
  const int64_t rng_state[2] = {-77, 123};
  for (const uint32_t threshold : {0u, 1u, 30000u, 65535u, 65536u}) {
    const DropoutStream stream = Dropout{rng_state, threshold}.stream(2, 3, 1);
    for (const int64_t row : {0, 1, 4095}) {
      for (const int64_t block : {0, 1, 2, 1000}) {
        const DropoutBlock kept = dropout_block(stream, row, block);
        for (int j = 0; j < kDropoutBlock; ++j) {
          ASSERT_EQ(kept.keep[j], stream.keep(row, block * kDropoutBlock + j))
              << "row " << row << " block " << block << " column " << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashattn
