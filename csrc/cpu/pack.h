// Between strided tensors of any element type and the packed row-major matrices of the
// microkernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "cpu/microkernels.h"

namespace flashattn::cpu {

// A strided matrix inside a tensor: (rows, columns).
template <class Element>
struct StridedMatrix {
  Element* data;
  int64_t row_stride, column_stride;
  int64_t rows, columns;
};

// to (rows, padded columns) = from; the padding is zero.
template <class Real, class Element>
void pack(const StridedMatrix<const Element>& from, Real* to) {
  const int64_t stride = padded_columns(from.columns);
  for (int64_t r = 0; r < from.rows; ++r, to += stride) {
    const Element* row = from.data + r * from.row_stride;
    if (from.column_stride == 1) {
      for (int64_t c = 0; c < from.columns; ++c) to[c] = convert<Real>(row[c]);
    } else {
      for (int64_t c = 0; c < from.columns; ++c) to[c] = convert<Real>(row[c * from.column_stride]);
    }
    std::fill(to + from.columns, to + stride, Real(0));
  }
}

// to (columns, padded rows) = from transposed; the padding is zero.
template <class Real, class Element>
void pack_transposed(const StridedMatrix<const Element>& from, Real* to) {
  constexpr int64_t kBlock = 16;  // rows whose elements make one cache line of the result
  const int64_t stride = padded_columns(from.rows);
  for (int64_t first = 0; first < stride; first += kBlock) {
    const int64_t rows = std::clamp<int64_t>(from.rows - first, 0, kBlock);
    const Element* block = from.data + first * from.row_stride;
    for (int64_t c = 0; c < from.columns; ++c) {
      Real* line = to + c * stride + first;
      const Element* column = block + c * from.column_stride;
      for (int64_t r = 0; r < rows; ++r) line[r] = convert<Real>(column[r * from.row_stride]);
      std::fill(line + rows, line + kBlock, Real(0));
    }
  }
}

// One row of a packed matrix, times a factor, to the tensor.
template <class Real, class Element>
void store_row(const Real* from, int64_t columns, Real factor, Element* to, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c) to[c * stride] = convert<Element>(from[c] * factor);
}

// What store_row lost by rounding.
template <class Real, class Element>
void store_rounding(const Real* from, int64_t columns, Real factor, Element* to, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c) {
    to[c * stride] = convert<Element>(rounding_error<Element>(from[c] * factor));
  }
}

}  // namespace flashattn::cpu
