// A matrix inside a tensor, as the microkernels read and write it.
#pragma once

#include <cstdint>

#include "core/mask.h"
#include "core/tensor_view.h"

namespace flashattn::cpu {

// (rows, columns), any strides.
template <class Element>
struct StridedMatrix {
  Element* data;
  int64_t row_stride, column_stride;
  int64_t rows, columns;
};

// Rows [rows.begin, rows.end) of one (batch, head) of a (batch, heads, length, head_dim) view,
// which may be longer: `rows` count from the storage's first.
template <class Element>
StridedMatrix<Element> rows_of(const UntypedView4& view, int64_t batch, int64_t head, Range rows,
                               int64_t columns) {
  return {view.as<Element>().at(batch, head, rows.begin), view.stride[2], view.stride[3],
          rows.size(), columns};
}

// All of one (batch, head).
template <class Element>
StridedMatrix<Element> matrix_of(const UntypedView4& view, int64_t batch, int64_t head) {
  return rows_of<Element>(view, batch, head, {0, view.size[2]}, view.size[3]);
}

}  // namespace flashattn::cpu
