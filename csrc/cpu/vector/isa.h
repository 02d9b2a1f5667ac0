// The instruction set of the file that includes this, as its compiler flags say: how wide a vector
// is, how many registers there are, and the few operations that need an instruction by name.
// Everything in csrc/cpu/vector/ is in an unnamed namespace: the linker must not let one
// instruction set's copy of a function serve another.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace flashattn::cpu {
namespace {

#if defined(__AVX512F__)
// 32 registers: 24 hold C, 4 a row of B.
struct Isa {
  static constexpr int kBytes = 64, kRows = 6, kVectors = 4;
};
#elif defined(__AVX2__)
// 16 registers: 12 hold C, 2 a row of B.
struct Isa {
  static constexpr int kBytes = 32, kRows = 6, kVectors = 2;
};
#else
// 16 registers: 12 hold C, as doubles, 2 a row of B.
struct Isa {
  static constexpr int kBytes = 16, kRows = 3, kVectors = 2;
};
#endif

template <class Word>
struct VectorOf {
  typedef Word type __attribute__((vector_size(Isa::kBytes)));
};
template <class Word>
using Vector = typename VectorOf<Word>::type;

template <class Word>
inline constexpr int kLanes = Isa::kBytes / sizeof(Word);

using Words = Vector<uint32_t>;

// a * b + c. Rounded once where the instruction set has it; never left to the compiler's choice.
inline Vector<float> multiply_add(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vector<double> multiply_add(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger of each lane; `b` where `a` is NaN.
inline Vector<float> larger(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline Vector<double> larger(Vector<double> a, Vector<double> b) { return a > b ? a : b; }

// The smaller of each lane; `b` where either is NaN.
inline Vector<float> smaller(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// The products of the low halves of 64-bit lanes.
inline Vector<uint64_t> multiply_low_halves(Vector<uint64_t> a, Vector<uint64_t> b) {
#if defined(__AVX512F__)
  return (Vector<uint64_t>)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Vector<uint64_t>)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Vector<uint64_t>)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// --- conversions of one vector of elements; memory needs no alignment ---

inline Vector<float> load_elements(const float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vector<float> vector;
  for (int lane = 0; lane < kLanes<float>; ++lane) vector[lane] = static_cast<float>(from[lane]);
  return vector;
#endif
}

inline void store_elements(float16* to, Vector<float> vector) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < kLanes<float>; ++lane) to[lane] = float16(vector[lane]);
#endif
}

typedef uint16_t HalfWords __attribute__((vector_size(Isa::kBytes / 2)));  // one per float lane

inline Vector<float> load_elements(const bfloat16* from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vector<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  HalfWords bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (Vector<float>)(__builtin_convertvector(bits, Words) << 16);
#endif
}

// Round to nearest even; NaN stays NaN. (The instruction takes what is below the smallest normal
// number for 0.)
inline HalfWords to_bfloat_bits(Vector<float> vector) {
#if defined(__AVX512BF16__)
  return (HalfWords)_mm512_cvtneps_pbh(vector);
#else
  const Words bits = (Words)vector;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(vector == vector ? rounded : (bits >> 16) | 0x40, HalfWords);
#endif
}

inline void store_elements(bfloat16* to, Vector<float> vector) {
  const HalfWords bits = to_bfloat_bits(vector);
  std::memcpy(to, &bits, sizeof(bits));
}

}  // namespace
}  // namespace flashattn::cpu
