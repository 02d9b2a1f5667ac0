// Philox4x32, a counter-based random function (Salmon, Moraes, Dror, Shaw: "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

#include "core/high_product.h"
#include "core/host_device.h"

namespace flashattn {

struct PhiloxCounter {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t word[2];
};

template <int Rounds>
FLASHATTN_HD PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < Rounds; ++round) {
    constexpr uint32_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u;
    const uint32_t (&word)[4] = counter.word;
    counter = {{high_product(word[2], kFactor1) ^ word[1] ^ key.word[0], word[2] * kFactor1,
                high_product(word[0], kFactor0) ^ word[3] ^ key.word[1], word[0] * kFactor0}};
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace flashattn
