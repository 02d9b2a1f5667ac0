// Products with keys and values as they lie in their tensors: for so few rows of queries that
// packing would cost more than the product.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/vector/multiply.h"
#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// Adds neighbours at distance Half in both vectors and lays the sums side by side.
template <int Half, class Real, int... Lane>
inline Vector<Real> paired_sums(Vector<Real> a, Vector<Real> b,
                                std::integer_sequence<int, Lane...>) {
  constexpr int kCount = kLanes<Real>;
  return __builtin_shufflevector(a, b, (Lane & Half ? kCount + Lane - Half : Lane)...) +
         __builtin_shufflevector(a, b, (Lane & Half ? kCount + Lane : Lane + Half)...);
}

// Lane i of the result is the sum of the lanes of rows[i]; the rows are destroyed.
template <class Real, int Half = 1>
inline Vector<Real> sums_of_rows(Vector<Real>* rows) {
  constexpr int kCount = kLanes<Real>;
  if constexpr (Half == kCount) {
    return rows[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kCount / Half / 2; ++i) {
      rows[i] = paired_sums<Half, Real>(rows[2 * i], rows[2 * i + 1],
                                        std::make_integer_sequence<int, kCount>());
    }
    return sums_of_rows<Real, 2 * Half>(rows);
  }
}

// scores (rows, keys) = queries (rows, head_dim) * keys^T (head_dim, keys).
template <class Element>
void dots_in_place(const StridedMatrix<const Accumulator<Element>>& queries,
                   const StridedMatrix<const Element>& keys, Accumulator<Element>* scores,
                   int64_t stride) {
  using Real = Accumulator<Element>;
  constexpr int kCount = kLanes<Real>;
  const int64_t whole = keys.columns / kCount * kCount;
  for (int64_t k = 0; k < keys.rows; k += kCount) {
    const int64_t count = std::min<int64_t>(kCount, keys.rows - k);
    const Element* block = keys.data + k * keys.row_stride;
    for (int64_t r = 0; r < queries.rows; ++r) {
      const Real* query = queries.data + r * queries.row_stride;
      Vector<Real> sum[kCount] = {};
      if (count == kCount) {
        for (int64_t c = 0; c < whole; c += kCount) {
          const Vector<Real> q = load(query + c);
#pragma GCC unroll 16
          for (int i = 0; i < kCount; ++i) {
            sum[i] = multiply_add(load_elements(block + i * keys.row_stride + c), q, sum[i]);
          }
        }
      } else {
        for (int i = 0; i < count; ++i) {
          for (int64_t c = 0; c < whole; c += kCount) {
            sum[i] = multiply_add(load_elements(block + i * keys.row_stride + c), load(query + c),
                                  sum[i]);
          }
        }
      }
      if (whole < keys.columns) {
        const int64_t left = keys.columns - whole;
        const Vector<Real> q = load_some<Real>(query + whole, 1, left);
        for (int i = 0; i < count; ++i) {
          const Element* key = block + i * keys.row_stride + whole;
          sum[i] = multiply_add(load_some<Real>(key, 1, left), q, sum[i]);
        }
      }
      store(scores + r * stride + k, sums_of_rows<Real>(sum));
    }
  }
}

// out (rows, head_dim_v) += weights (rows, keys) * values (keys, head_dim_v).
template <class Element>
void weighted_sums_in_place(const StridedMatrix<const Accumulator<Element>>& weights,
                            const StridedMatrix<const Element>& values, Accumulator<Element>* out,
                            int64_t stride) {
  using Real = Accumulator<Element>;
  constexpr int kCount = kLanes<Real>;
  const int64_t whole = values.columns / kCount * kCount;
  VectorProduct<Real, Element>::multiply({weights.rows, whole, values.rows, weights.data,
                                          weights.row_stride, values.data, values.row_stride, out,
                                          stride, Store::accumulate});
  if (whole == values.columns) return;
  const int64_t left = values.columns - whole;
  for (int64_t r = 0; r < weights.rows; ++r) {
    Real* to = out + r * stride + whole;
    Vector<Real> sum = load(to);
    for (int64_t k = 0; k < values.rows; ++k) {
      const Vector<Real> value =
          load_some<Real>(values.data + k * values.row_stride + whole, 1, left);
      sum = multiply_add(value, broadcast(weights.data[r * weights.row_stride + k]), sum);
    }
    store(to, sum);
  }
}

}  // namespace
}  // namespace flashattn::cpu
