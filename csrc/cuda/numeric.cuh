// Arithmetic of the CUDA kernels that depends on the element type.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// exp, as exact as the type of the result asks for. For 16 bits the hardware's 2^x is: its error and
// that of the product, 2^-22 + |x| 2^-24, only reach the rounding of the result far below 2^-100.
template <class Result>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(Result) == 2) {
    return ptx::exp2_approximate(x * 1.44269504f);
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

// Rounds and stores `Count` neighbours at once; `to` is aligned to their bytes, or to 16.
template <int Count, class Element, class Real>
__device__ __forceinline__ void store_neighbours(Element* to, const Real (&values)[Count]) {
  constexpr int kBytes = Count * sizeof(Element), kWord = kBytes < 16 ? kBytes : 16;
  struct alignas(kWord) Word {
    unsigned char byte[kWord];
  };
  struct Words {
    Word word[kBytes / kWord];
  };
  Words words;
  if constexpr (sizeof(Element) == 2 && Count > 1) {
    uint32_t pair[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      pair[i] = ptx::pack<Element>(values[2 * i], values[2 * i + 1]);
    }
    words = bit_cast<Words>(pair);
  } else {
    Element element[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) element[i] = convert<Element>(values[i]);
    words = bit_cast<Words>(element);
  }
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i) reinterpret_cast<Word*>(to)[i] = words.word[i];
}

}  // namespace flashattn::cuda
