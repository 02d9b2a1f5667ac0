// Arithmetic that C++ has no operator for: one function per instruction.
#pragma once

namespace flashattn::cuda::ptx {

// The larger number; NaN if either is (fmaxf passes NaN over).
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace flashattn::cuda::ptx
