// (batch, heads, rows, columns) views as the batched matrices of a BLAS. Host C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/tensor_view.h"

namespace flashattn::cuda::naive {

// How a BLAS reads a matrix: neighbours along a row or along a column, and the distance between two
// of what is left.
struct MatrixLayout {
  bool row_major;
  int64_t leading;
};

// Nothing for views that a BLAS cannot read. Strides along a dimension of size 1 mean nothing.
inline std::optional<MatrixLayout> layout_of(const UntypedView4& view) {
  const int64_t rows = view.size[2], columns = view.size[3];
  const bool one_row = rows <= 1, one_column = columns <= 1;
  if ((one_column || view.stride[3] == 1) && (one_row || view.stride[2] >= columns)) {
    return MatrixLayout{true, std::max<int64_t>({one_row ? columns : view.stride[2], columns, 1})};
  }
  if ((one_row || view.stride[2] == 1) && (one_column || view.stride[3] >= rows)) {
    return MatrixLayout{false, std::max<int64_t>({one_column ? rows : view.stride[3], rows, 1})};
  }
  return std::nullopt;
}

inline UntypedView4 transposed(UntypedView4 view) {
  std::swap(view.size[2], view.size[3]);
  std::swap(view.stride[2], view.stride[3]);
  return view;
}

// A contiguous view of these sizes.
inline UntypedView4 contiguous_view(void* data, const int64_t (&size)[4]) {
  UntypedView4 view;
  view.data = data;
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    view.size[d] = size[d];
    view.stride[d] = stride;
    stride *= std::max<int64_t>(size[d], 1);
  }
  return view;
}

inline int64_t elements_of(const UntypedView4& view) {
  return view.size[0] * view.size[1] * view.size[2] * view.size[3];
}

// The rows of `group` neighbouring heads one below another: (batch, heads / group, group * rows,
// columns), so that one product serves a kv head. Nothing if they are not evenly spaced.
inline std::optional<UntypedView4> grouped(UntypedView4 view, int64_t group) {
  if (group == 1) return view;
  const int64_t rows = view.size[2];
  if (rows > 1 && view.stride[1] != rows * view.stride[2]) return std::nullopt;
  if (rows == 1) view.stride[2] = view.stride[1];
  view.stride[1] *= group;
  view.size[1] /= group;
  view.size[2] *= group;
  return view;
}

// The matrices of a batch as runs of evenly spaced ones: `runs` of `count`.
struct MatrixRuns {
  int64_t runs, count;
  int outer, inner;  // dimensions of the view: which one a run's number and a matrix's place move
};

// One run if every view allows it; else one for each entry of the smaller of batch and heads.
inline MatrixRuns runs_of(const UntypedView4& a, const UntypedView4& b, const UntypedView4& c) {
  const int64_t batch = c.size[0], heads = c.size[1];
  const auto joined = [&](const UntypedView4& v) { return v.stride[0] == heads * v.stride[1]; };
  if (heads == 1) return {1, batch, 1, 0};
  if (batch == 1 || (joined(a) && joined(b) && joined(c))) return {1, batch * heads, 0, 1};
  if (batch <= heads) return {batch, heads, 0, 1};
  return {heads, batch, 1, 0};
}

}  // namespace flashattn::cuda::naive
