// Philox4x32, a counter-based random function (Salmon, Moraes, Dror, Shaw: "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

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
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
                static_cast<uint32_t>(product0)}};
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace flashattn
