// Arithmetic of the CUDA kernels that depends on the element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/dtype.h"

namespace flashattn::cuda {

// exp, as exact as the type of the result asks for: where that has 16 bits, the hardware's
// 2^x (relative error about 2^-21 for results that are not negligible) is far below its rounding.
template <class Result>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(Result) == 2) {
    return __expf(x);
  } else {
    return expf(x);
  }
}
template <class Result>
__device__ __noinline__ double exponential(double x) {  // long, and fp64 is not about speed
  return exp(x);
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // skips NaN
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// 16 bytes of a tensor: what one thread loads at a time.
template <class Element>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(Element);
  Element element[kSize];
};

// Two results rounded by one instruction.
__device__ __forceinline__ uint32_t round_pair(float first, float second, float16) {
  const __half2 pair = __floats2half2_rn(first, second);
  return bit_cast<uint32_t>(pair);
}
__device__ __forceinline__ uint32_t round_pair(float first, float second, bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return bit_cast<uint32_t>(pair);
}

}  // namespace flashattn::cuda
