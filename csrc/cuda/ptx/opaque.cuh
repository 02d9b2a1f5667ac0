// An optimisation barrier.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// The same word, of which the compiler no longer knows where it came from: what was computed from
// it before is computed again, not kept in registers.
__device__ __forceinline__ uint32_t opaque(uint32_t word) {
  asm volatile("" : "+r"(word));
  return word;
}

}  // namespace flashattn::cuda::ptx
