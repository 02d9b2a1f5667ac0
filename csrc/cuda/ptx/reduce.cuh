// Sums in global memory: one function per instruction.
#pragma once

namespace flashattn::cuda::ptx {

// Adds four neighbours, 16-byte aligned, in no particular order with other threads.
__device__ __forceinline__ void add_to_global(float* to, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, values[i]);
#endif
}
__device__ __forceinline__ void add_to_global(double* to, const double (&values)[4]) {
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, values[i]);
}

// A counter that blocks take turns by: what was written before `release` is seen after `acquire`.
__device__ __forceinline__ int acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void release(int* counter, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

}  // namespace flashattn::cuda::ptx
