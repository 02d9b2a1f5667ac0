// The dropout decisions of a whole attention problem, written out.
#pragma once

#include <cstdint>

#include "core/dropout.h"

namespace flashattn {

struct DropoutMaskProblem {
  Dropout dropout;
  int64_t batch, heads_q, len_q, len_k;
  bool* mask;  // (batch, heads_q, len_q, len_k) contiguous; true = kept
};

// What is computed at a time: columns [32 * block, 32 * block + 32) of one row, which four Philox
// calls decide.
inline constexpr int kDropoutBlock = 32;

struct DropoutBlock {
  bool keep[kDropoutBlock];
};

FLASHATTN_HD DropoutBlock dropout_block(const DropoutStream& stream, int64_t row, int64_t block) {
  DropoutBlock result;
  for (int quad = 0; quad < 4; ++quad) {
    const DropoutNumbers numbers = stream.numbers(row, block * 4 + quad);
    for (int slot = 0; slot < 8; ++slot) {
      result.keep[slot / 2 * 8 + quad * 2 + slot % 2] = numbers.number(slot) < stream.threshold;
    }
  }
  return result;
}

}  // namespace flashattn
