// Loads from memory: one function per instruction.
#pragma once

#include <cstdint>

namespace flashattn::cuda::ptx {

// 16 bytes, or four times `otherwise` without an access when `valid` is false. A conditional load
// in C++ becomes one select per element that is made of the words.
__device__ __forceinline__ uint4 load_16(const void* global, bool valid, uint32_t otherwise) {
  uint4 words;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;\n"
      "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(global), "r"(static_cast<uint32_t>(valid)), "r"(otherwise));
  return words;
}

// Asks for `bytes` from a global address on, both multiples of 16, to be in the L2 cache. Without
// the bulk copies of sm_90 nothing happens.
__device__ __forceinline__ void prefetch_to_l2(uintptr_t global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

__device__ __forceinline__ uint32_t load_shared(uint32_t shared_address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared_address));
  return word;
}

}  // namespace flashattn::cuda::ptx
