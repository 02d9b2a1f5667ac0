// Products with keys and values as they lie in their tensors: for so few rows of queries that
// packing would cost more than the product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/microkernels.h"
#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// The elements that one load brings, as vectors of Reals: lane i of vector v is element
// i * kVectors + v.
template <class Element>
struct Chunk {
  using Real = Accumulator<Element>;
  static constexpr int kVectors = 1, kElements = kLanes<Real>;

  static void load(const Element* from, Vector<Real>* to) { *to = load_elements(from); }
};

// Two bfloat16 are the halves of a word, and the upper one is almost a float: no lane has to move.
template <>
struct Chunk<bfloat16> {
  static constexpr int kVectors = 2, kElements = 2 * kLanes<float>;

  static void load(const bfloat16* from, Vector<float>* to) {
    Words words;
    std::memcpy(&words, from, sizeof(words));
    to[0] = (Vector<float>)(words << 16);
    to[1] = (Vector<float>)(words & 0xffff0000u);
  }
};

// Keys and values are asked for this many rows before they are needed; wider ones come in time by
// themselves.
inline constexpr int64_t kRowsAhead = 32;
template <class Element>
inline constexpr bool kPrefetches = sizeof(Element) == 2;

// Between a chunk's order and that of the columns, in memory.
template <class Element, class Real>
void chunk_order(const Real* columns, Real* chunk) {
  constexpr int kVectors = Chunk<Element>::kVectors;
  for (int v = 0; v < kVectors; ++v) {
    for (int i = 0; i < kLanes<Real>; ++i) chunk[v * kLanes<Real> + i] = columns[i * kVectors + v];
  }
}
template <class Element, class Real>
void add_in_column_order(const Vector<Real>* chunk, Real* columns) {
  constexpr int kVectors = Chunk<Element>::kVectors;
  for (int v = 0; v < kVectors; ++v) {
    for (int i = 0; i < kLanes<Real>; ++i) columns[i * kVectors + v] += chunk[v][i];
  }
}

// scores (rows, keys) = queries (rows, head_dim) * keys^T (head_dim, keys).
template <class Element>
struct DotsInPlace {
  using Real = Accumulator<Element>;
  using Keys = StridedMatrix<const Element>;
  static constexpr int kCount = kLanes<Real>, kVectors = Chunk<Element>::kVectors;
  static constexpr int64_t kStep = Chunk<Element>::kElements;

  static void run(const StridedMatrix<const Real>& queries, const Keys& keys, Real* scores,
                  int64_t stride) {
    const int64_t whole = keys.columns / kStep * kStep;
    for (int64_t r = 0; r < queries.rows; ++r) {
      Real query[kMostHeadDim];  // in the order of chunks, then the rest
      const Real* row = queries.data + r * queries.row_stride;
      for (int64_t c = 0; c < whole; c += kStep) chunk_order<Element>(row + c, query + c);
      std::copy(row + whole, row + keys.columns, query + whole);
      for (int64_t k = 0; k < keys.rows; k += kCount) {
        const Element* block = keys.data + k * keys.row_stride;
        store(scores + r * stride + k, k + kCount <= keys.rows
                                           ? dots<kCount>(query, block, keys, whole, kCount)
                                           : dots<1>(query, block, keys, whole, keys.rows - k));
      }
    }
  }

 private:
  static constexpr int64_t kMostHeadDim = 512;

  // Of one query with up to kCount keys, `Step` at a time.
  template <int Step>
  static Vector<Real> dots(const Real* query, const Element* block, const Keys& keys, int64_t whole,
                           int64_t count) {
    Vector<Real> sums[kCount] = {};
    for (int64_t first = 0; first < count; first += Step) {
      const Element* key = block + first * keys.row_stride;
      for (int64_t c = 0; c < whole; c += kStep) {
#pragma GCC unroll 16
        for (int i = 0; i < Step; ++i) {
          Vector<Real> part[kVectors];
          Chunk<Element>::load(key + i * keys.row_stride + c, part);
          if (kPrefetches<Element> && Step > 1) {
            __builtin_prefetch(key + (i + kRowsAhead) * keys.row_stride + c);
          }
          for (int v = 0; v < kVectors; ++v) {
            sums[first + i] = multiply_add(part[v], load(query + c + v * kCount), sums[first + i]);
          }
        }
      }
      for (int64_t c = whole; c < keys.columns; c += kCount) {
        const int64_t left = keys.columns - c;
        const Vector<Real> q = load_some<Real>(query + c, 1, left);
        for (int i = 0; i < Step; ++i) {
          const Vector<Real> part = load_some<Real>(key + i * keys.row_stride + c, 1, left);
          sums[first + i] = multiply_add(part, q, sums[first + i]);
        }
      }
    }
    return sums_of_rows<Real>(sums);
  }
};

// out (rows, head_dim_v) += weights (rows, keys) * values (keys, head_dim_v).
template <class Element>
struct WeightedSumsInPlace {
  using Real = Accumulator<Element>;
  using Weights = StridedMatrix<const Real>;
  using Values = StridedMatrix<const Element>;
  static constexpr int kCount = kLanes<Real>, kVectors = Chunk<Element>::kVectors;
  static constexpr int64_t kStep = Chunk<Element>::kElements;
  static constexpr int kRows = 4;  // that share what is loaded

  static void run(const Weights& weights, const Values& values, Real* out, int64_t stride) {
    int64_t row = 0;
    for (; row + kRows <= weights.rows; row += kRows) {
      rows<kRows>(weights, values, row, out + row * stride, stride);
    }
    for (; row < weights.rows; ++row) rows<1>(weights, values, row, out + row * stride, stride);
  }

 private:
  // The sums of a block stay in registers: chunks of columns.
  template <int Rows>
  static constexpr int kChunks = (Rows == 1 ? 8 : Isa::kVectors) / kVectors;

  template <int Rows>
  static void rows(const Weights& weights, const Values& values, int64_t row, Real* out,
                   int64_t stride) {
    int64_t column = 0;
    for (int64_t left = values.columns / kStep; left > 0;) {
      const int64_t take = std::min<int64_t>(left, kChunks<Rows>);
      chunks<Rows, kChunks<Rows>>(weights, values, row, column, out, stride, take);
      column += take * kStep;
      left -= take;
    }
    for (; column < values.columns; column += kCount) {
      for (int64_t r = 0; r < Rows; ++r) {
        last_columns(weights, values, row + r, column, out + r * stride + column);
      }
    }
  }

  template <int Rows, int Chunks>
  static void chunks(const Weights& weights, const Values& values, int64_t row, int64_t column,
                     Real* out, int64_t stride, int64_t count) {
    if constexpr (Chunks > 1) {
      if (count < Chunks) {
        return chunks<Rows, Chunks - 1>(weights, values, row, column, out, stride, count);
      }
    }
    Vector<Real> sums[Rows][Chunks * kVectors] = {};
    const Real* weight = weights.data + row * weights.row_stride;
    const Element* value = values.data + column;
    for (int64_t k = 0; k < values.rows; ++k, ++weight, value += values.row_stride) {
      Vector<Real> part[Chunks * kVectors];
      for (int i = 0; i < Chunks; ++i) {
        Chunk<Element>::load(value + i * kStep, part + i * kVectors);
        if (kPrefetches<Element>) {
          __builtin_prefetch(value + kRowsAhead * values.row_stride + i * kStep);
        }
      }
      for (int r = 0; r < Rows; ++r) {
        const Vector<Real> factor = broadcast(weight[r * weights.row_stride]);
        for (int i = 0; i < Chunks * kVectors; ++i) {
          sums[r][i] = multiply_add(part[i], factor, sums[r][i]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int i = 0; i < Chunks; ++i) {
        add_in_column_order<Element>(sums[r] + i * kVectors, out + r * stride + column + i * kStep);
      }
    }
  }

  static void last_columns(const Weights& weights, const Values& values, int64_t row,
                           int64_t column, Real* out) {
    Vector<Real> sum = load(out);
    for (int64_t k = 0; k < values.rows; ++k) {
      const Vector<Real> value =
          load_some<Real>(values.data + k * values.row_stride + column, 1, values.columns - column);
      sum = multiply_add(value, broadcast(weights.data[row * weights.row_stride + k]), sum);
    }
    store(out, sum);
  }
};

}  // namespace
}  // namespace flashattn::cpu
