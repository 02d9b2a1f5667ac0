// Arithmetic of the CUDA kernels that depends on the element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/dtype.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashattn::cuda {

// exp for a result of a type: 0 at -inf, NaN at NaN, results below the smallest normal number are
// 0.
//
// exp(x) = 2^t with t = x log2(e). The hardware's 2^t is good to 2 units in the last place, but t
// carries the rounding of the product; for fp32 results, what is left, x - t ln(2), corrects it.
template <class Result>
__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
  if constexpr (sizeof(Result) == 2) {
    return ptx::exp2_approximate(x * kLog2E);
  } else {
    x = ptx::max_or_nan(x, -200.f);  // -inf minus -inf must not occur below
    const float t = x * kLog2E;
    const float power = ptx::exp2_approximate(t);
    return fmaf(power, fmaf(t, -kLn2, x), power);
  }
}
template <class Result>
__device__ __noinline__ double exponential(double x) {  // long, and fp64 is not about speed
  return exp(x);
}

// exp(x - reference) for the many x of a row, all of them at most the reference, which is one of
// them or -inf.
template <class Result, class Real>
struct ExponentialBelow {
  Real reference;

  ExponentialBelow() = default;
  __device__ explicit ExponentialBelow(Real reference) : reference(reference) {}
  __device__ Real operator()(Real x) const { return exponential<Result>(x - reference); }
  // What results are to be multiplied by: the same for all.
  __device__ Real correction() const { return Real(1); }
};

// For results of 16 bits, from x of 16 bits, one multiply-add and a power of two. The multiply-add
// takes off a rounded multiple of log2(e); what it was rounded by is the correction. It is less
// than 1 up to 2^24; beyond that, 16-bit numbers that differ are so far apart that exp gives 0, in
// whatever base.
template <class Result>
  requires(sizeof(Result) == 2)
struct ExponentialBelow<Result, float> {
  float scale, shift, excess;

  ExponentialBelow() = default;
  __device__ explicit ExponentialBelow(float reference)
      : scale(fabsf(reference) <= 0x1p24f ? 1.44269504f : 1.f),
        shift(-reference * scale),
        excess(fmaf(reference, scale, shift)) {}
  __device__ float operator()(float x) const {
    return ptx::exp2_approximate(fmaf(x, scale, shift));
  }
  __device__ float correction() const { return ptx::exp2_approximate(-excess); }
};

__device__ __forceinline__ float larger(float a, float b) {
  return fmaxf(a, b);
}  // passes NaN over
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// 16 bytes of a tensor: what one thread loads at a time.
template <class Element>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(Element);
  Element element[kSize];

  // The same element everywhere, as one 32-bit word.
  __device__ static uint32_t word_of(Element element) {
    if constexpr (sizeof(Element) == 2) {
      return element.bits * 0x10001u;
    } else {
      return bit_cast<uint32_t>(element);
    }
  }
};

// Two 16-bit floats from one word, low half first.
__device__ __forceinline__ float2 unpack(uint32_t word, bfloat16) {
  return {bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t word, float16) {
  return __half22float2(bit_cast<__half2>(word));
}

// A chunk in the type that is computed in.
template <class Element, class Real>
__device__ __forceinline__ void widen(const Chunk<Element>& chunk, Real* values) {
  if constexpr (sizeof(Element) == 2) {
    const uint4 words = bit_cast<uint4>(chunk);
    const uint32_t word[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack(word[i], Element());
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<Element>::kSize; ++i) values[i] = convert<Real>(chunk.element[i]);
  }
}

// Stores the words at once. (Types of the right size: a struct of bytes is taken apart and
// rebuilt.)
__device__ __forceinline__ void store_words(void* to, const uint32_t (&word)[1]) {
  *static_cast<uint32_t*>(to) = word[0];
}
__device__ __forceinline__ void store_words(void* to, const uint32_t (&word)[2]) {
  *static_cast<uint2*>(to) = make_uint2(word[0], word[1]);
}
__device__ __forceinline__ void store_words(void* to, const uint32_t (&word)[4]) {
  *static_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ void store_words(void* to, const uint32_t (&word)[8]) {
  static_cast<uint4*>(to)[0] = make_uint4(word[0], word[1], word[2], word[3]);
  static_cast<uint4*>(to)[1] = make_uint4(word[4], word[5], word[6], word[7]);
}

// Rounds and stores `Count` neighbours; `to` is aligned to their bytes, or to 16.
template <int Count, class Element, class Real>
__device__ __forceinline__ void store_neighbours(Element* to, const Real (&values)[Count]) {
  if constexpr (Count == 1) {
    *to = convert<Element>(values[0]);
  } else if constexpr (sizeof(Element) == 2) {
    uint32_t word[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      word[i] = ptx::pack<Element>(values[2 * i], values[2 * i + 1]);
    }
    store_words(to, word);
  } else {
    Element element[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) element[i] = convert<Element>(values[i]);
    struct Words {
      uint32_t word[Count * sizeof(Element) / 4];
    };
    store_words(to, bit_cast<Words>(element).word);
  }
}

}  // namespace flashattn::cuda
