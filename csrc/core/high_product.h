// The high word of a product of two words.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flashattn {

FLASHATTN_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);  // one instruction; from 64-bit products nvcc makes more
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

}  // namespace flashattn
