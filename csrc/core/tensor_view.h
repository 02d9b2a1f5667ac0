// A pointer that knows its shape: sizes and strides in elements, both 64-bit.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flashattn {

template <class Element, int Rank>
struct TensorView {
  Element* data = nullptr;
  int64_t size[Rank] = {};
  int64_t stride[Rank] = {};

  template <class... Index>
  FLASHATTN_HD Element* at(Index... index) const {
    static_assert(sizeof...(Index) <= Rank);
    const int64_t indices[] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int d = 0; d < static_cast<int>(sizeof...(Index)); ++d) offset += indices[d] * stride[d];
    return data + offset;
  }

  // A view that is absent has no storage; a view of an empty tensor may have none either.
  FLASHATTN_HD explicit operator bool() const { return data != nullptr; }
};

// A view whose element type is known only at run time (DType beside it).
struct UntypedView4 {
  void* data = nullptr;
  int64_t size[4] = {};
  int64_t stride[4] = {};

  template <class Element>
  FLASHATTN_HD TensorView<Element, 4> as() const {
    TensorView<Element, 4> view;
    view.data = static_cast<Element*>(data);
    for (int d = 0; d < 4; ++d) {
      view.size[d] = size[d];
      view.stride[d] = stride[d];
    }
    return view;
  }
  FLASHATTN_HD explicit operator bool() const { return data != nullptr; }
};

}  // namespace flashattn
