// Loads, stores and reductions of one vector, whatever the element type, stride or count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/constants.h"
#include "cpu/vector/isa.h"

namespace flashattn::cpu {
namespace {

template <class Word>
inline Vector<Word> load(const Word* from) {
  Vector<Word> vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class Word>
inline void store(Word* to, Vector<Word> vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

inline Vector<float> load_elements(const float* from) { return load(from); }
inline Vector<double> load_elements(const double* from) { return load(from); }
inline void store_elements(float* to, Vector<float> vector) { store(to, vector); }
inline void store_elements(double* to, Vector<double> vector) { store(to, vector); }

// The first `count` elements (at most a vector of Real) of a strided row; the other lanes are 0.
template <class Real, class Element>
inline Vector<Real> load_some(const Element* from, int64_t stride, int64_t count) {
  if (stride == 1 && count >= kLanes<Real>) return load_elements(from);
  Element elements[kLanes<Real>];
  std::memset(elements, 0, sizeof(elements));
  if (count > kLanes<Real>) count = kLanes<Real>;
  for (int64_t i = 0; i < count; ++i) elements[i] = from[i * stride];
  return load_elements(elements);
}

// Stores past the caches: memory is not read before it is written, and nothing else leaves the
// caches for it. `to` is aligned to a vector's worth of elements. end_of_stream() closes a stream.
template <class Real, class Element>
inline void stream_elements(Element* to, Vector<Real> vector) {
  Element elements[kLanes<Real>];
  store_elements(elements, vector);
#if defined(__SSE2__)
  constexpr int kPieces = kLanes<Real> * sizeof(Element) / sizeof(__m128i);
#pragma GCC unroll 4
  for (int piece = 0; piece < kPieces; ++piece) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + piece,
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(elements) + piece));
  }
  if constexpr (kPieces > 0) return;
#endif
  std::memcpy(to, elements, sizeof(elements));
}

inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// As many of a narrower type as a vector has Reals.
template <class Real, class Narrow>
struct NarrowVectorOf {
  typedef Narrow type __attribute__((vector_size(kLanes<Real> * sizeof(Narrow))));
};

// Whether each of the first `count` flags of a strided row is true, as a comparison of Reals would
// say it; the other lanes are false.
template <class Real>
inline auto load_flags(const bool* from, int64_t stride, int64_t count) {
  constexpr int kCount = kLanes<Real>;
  using Integer = std::conditional_t<sizeof(Real) == 8, int64_t, int32_t>;
  typename NarrowVectorOf<Real, uint8_t>::type bytes{};
  if (stride == 1 && count >= kCount) {
    std::memcpy(&bytes, from, kCount);
  } else {
    for (int64_t i = 0; i < std::min<int64_t>(count, kCount); ++i) bytes[i] = from[i * stride];
  }
  // In two steps: the compiler would take one from 8 to 32 bits lane by lane.
  using Words16 = typename NarrowVectorOf<Real, uint16_t>::type;
  return __builtin_convertvector(__builtin_convertvector(bytes, Words16), Vector<Integer>) != 0;
}

template <class Real, class Element>
inline void store_some(Element* to, int64_t stride, int64_t count, Vector<Real> vector) {
  if (stride == 1 && count >= kLanes<Real>) return store_elements(to, vector);
  Element elements[kLanes<Real>];
  store_elements(elements, vector);
  if (count > kLanes<Real>) count = kLanes<Real>;
  for (int64_t i = 0; i < count; ++i) to[i * stride] = elements[i];
}

template <class Real>
inline Vector<Real> broadcast(Real value) {
  return value - Vector<Real>{};  // unlike a sum, the same for every value: -0 - 0 is -0
}

// A sum of products, each lane its own, as exact as with fused multiply-add.
template <class Real>
struct MultiplyAddSum {
  Vector<Real> sum{};

  void add(Vector<Real> a, Vector<Real> b) { sum = multiply_add(a, b, sum); }
  Vector<Real> rounded() const { return sum; }
};

#if !defined(__AVX2__)
// A product of floats has no rounding in double.
template <>
struct MultiplyAddSum<float> {
  typedef float Half __attribute__((vector_size(Isa::kBytes / 2)));
  Vector<double> low{}, high{};

  void add(Vector<float> a, Vector<float> b) {
    low += lower(a) * lower(b);
    high += upper(a) * upper(b);
  }
  Vector<float> rounded() const {
    const Half halves[2] = {__builtin_convertvector(low, Half),
                            __builtin_convertvector(high, Half)};
    Vector<float> result;
    std::memcpy(&result, halves, sizeof(result));
    return result;
  }

 private:
  static Vector<double> lower(Vector<float> v) {
    return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1), Vector<double>);
  }
  static Vector<double> upper(Vector<float> v) {
    return __builtin_convertvector(__builtin_shufflevector(v, v, 2, 3), Vector<double>);
  }
};
#endif

// The lanes' own numbers: 0, 1, 2 ...
template <class Word>
inline Vector<Word> lane_numbers() {
  Vector<Word> vector;
  for (int lane = 0; lane < kLanes<Word>; ++lane) vector[lane] = static_cast<Word>(lane);
  return vector;
}

// The vector with lane i taken from lane i ^ Distance.
template <int Distance, class Real, int... Lane>
inline Vector<Real> exchanged(Vector<Real> v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ Distance)...);
}

// Combines all lanes, in pairs, pairs of pairs and so on.
template <class Real, int Distance = kLanes<Real> / 2, class Combine>
inline Real fold_lanes(Vector<Real> v, const Combine& combine) {
  if constexpr (Distance == 0) {
    return v[0];
  } else {
    const Vector<Real> other =
        exchanged<Distance, Real>(v, std::make_integer_sequence<int, kLanes<Real>>());
    return fold_lanes<Real, Distance / 2>(combine(v, other), combine);
  }
}

// Combines neighbours at distance Half in both vectors and lays the results side by side.
template <int Half, class Real, class Combine, int... Lane>
inline Vector<Real> combine_neighbours(Vector<Real> a, Vector<Real> b, const Combine& combine,
                                       std::integer_sequence<int, Lane...>) {
  constexpr int kCount = kLanes<Real>;
  return combine(__builtin_shufflevector(a, b, (Lane & Half ? kCount + Lane - Half : Lane)...),
                 __builtin_shufflevector(a, b, (Lane & Half ? kCount + Lane : Lane + Half)...));
}

// Lane i of the result is all lanes of rows[i] combined; rows[0, lanes) are destroyed.
template <class Real, int Half = 1, class Combine>
inline Vector<Real> fold_rows(Vector<Real>* rows, const Combine& combine) {
  constexpr int kCount = kLanes<Real>;
  if constexpr (Half == kCount) {
    return rows[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kCount / Half / 2; ++i) {
      rows[i] = combine_neighbours<Half, Real>(rows[2 * i], rows[2 * i + 1], combine,
                                               std::make_integer_sequence<int, kCount>());
    }
    return fold_rows<Real, 2 * Half>(rows, combine);
  }
}

template <class Real>
inline Vector<Real> sums_of_rows(Vector<Real>* rows) {
  return fold_rows<Real>(rows, [](Vector<Real> a, Vector<Real> b) { return a + b; });
}

// No lane may be NaN.
template <class Real>
inline Vector<Real> largest_of_rows(Vector<Real>* rows) {
  return fold_rows<Real>(rows, [](Vector<Real> a, Vector<Real> b) { return larger(a, b); });
}

template <class Real>
inline Real sum_of_lanes(Vector<Real> v) {
  return fold_lanes<Real>(v, [](Vector<Real> a, Vector<Real> b) { return a + b; });
}

// No lane may be NaN.
template <class Real>
inline Real largest_lane(Vector<Real> v) {
  return fold_lanes<Real>(v, [](Vector<Real> a, Vector<Real> b) { return larger(a, b); });
}

}  // namespace
}  // namespace flashattn::cpu
