// The largest visible score of a (batch, head), for return_max_logits.
#pragma once

#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

// NaN if either is: the scores' maximum shows what the output will.
__device__ __forceinline__ float max_or_nan(float a, float b) { return a != a || a > b ? a : b; }

template <class Real, int Blocks>
__device__ __forceinline__ float max_of(float max, const Real (&scores)[Blocks][4],
                                        const RowPosition& at, int64_t rows_end) {
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (at.row_of(b, e) < rows_end) max = max_or_nan(max, static_cast<float>(scores[b][e]));
    }
  }
  return max;
}

// Called by whole warps. The order of the bit patterns is the order of the numbers once those of
// negative numbers are read backwards; NaN is above everything.
__device__ __forceinline__ void atomic_max(float* address, float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if (threadIdx.x % 32 != 0) return;
  if (value != value) value = __int_as_float(0x7fffffff);
  if (__float_as_int(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
  }
}

}  // namespace flashattn::cuda
