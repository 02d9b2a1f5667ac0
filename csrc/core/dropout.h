// Dropout as a pure function of (batch, head, row, column): the same bits on every device, in every
// kernel and in both directions.
//
// One Philox call gives eight 16-bit numbers, for the eight columns of a row that one thread owns
// in the m16n8 / m64nN accumulator layout: columns 2t, 2t+1 of each 8 in a block of 32.
#pragma once

#include <cstdint>

#include "core/constants.h"
#include "core/host_device.h"
#include "core/philox.h"

namespace flashattn {

// The eight numbers of one (row, group).
struct DropoutNumbers {
  PhiloxCounter words;

  FLASHATTN_HD uint32_t number(int slot) const {
    return (words.word[slot / 2] >> (16 * (slot % 2))) & 0xffffu;
  }
};

FLASHATTN_HD int64_t dropout_group(int64_t col) { return (col / 32) * 4 + (col / 2) % 4; }
FLASHATTN_HD int dropout_slot(int64_t col) {
  return static_cast<int>(((col / 8) % 4) * 2 + col % 2);
}

// The bits of one (batch, head).
struct DropoutStream {
  PhiloxKey key;
  uint64_t position;   // offset + batch * heads_q + head
  uint32_t threshold;  // keep when number < threshold

  FLASHATTN_HD DropoutNumbers numbers(int64_t row, int64_t group) const {
    const PhiloxCounter counter{{static_cast<uint32_t>(position),
                                 static_cast<uint32_t>(position >> 32), static_cast<uint32_t>(row),
                                 static_cast<uint32_t>(group)}};
    return {philox4x32<kDropoutRounds>(counter, key)};
  }

  FLASHATTN_HD bool keep(int64_t row, int64_t col) const {
    return numbers(row, dropout_group(col)).number(dropout_slot(col)) < threshold;
  }
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

struct Dropout {
  // (2) = [seed, offset] on the inputs' device; null: no dropout.
  const int64_t* rng_state = nullptr;
  uint32_t threshold = kDropoutLevels;

  FLASHATTN_HD explicit operator bool() const { return rng_state != nullptr; }
  FLASHATTN_HD double keep_rate() const { return threshold / double{kDropoutLevels}; }
  // What a kept probability is multiplied by; nothing is kept when the rate is 0.
  FLASHATTN_HD double keep_scale() const { return threshold ? 1.0 / keep_rate() : 0.0; }

  FLASHATTN_HD DropoutStream stream(int64_t batch, int64_t heads_q, int64_t head) const {
    const uint64_t seed = static_cast<uint64_t>(rng_state[0]);
    const uint64_t offset = static_cast<uint64_t>(rng_state[1]);
    return {{{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}},
            offset + static_cast<uint64_t>(batch * heads_q + head),
            threshold};
  }

  // round((1 - p) * levels); p is in [0, 1].
  static uint32_t threshold_for(double dropout_p) {
    return static_cast<uint32_t>((1.0 - dropout_p) * kDropoutLevels + 0.5);
  }
};

}  // namespace flashattn
