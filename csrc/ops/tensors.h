// From torch tensors to the views of core/, and back: allocation with a chosen dimension order.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "core/dtype.h"
#include "core/tensor_view.h"
#include "ops/checks.h"

namespace flashattn::ops {

inline DType to_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return DType::float16;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::Bool: return DType::boolean;
    default: STD_TORCH_CHECK(false, "flashattn_ext: no kernels for dtype ", dtype_text(dtype));
  }
}

inline ScalarType accumulator_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Strides of a dense tensor whose dimensions lie in memory in the order of `like`'s. Dimensions of
// size 1 or stride 0 say nothing about order and stay where they are; the others share their slots
// by falling stride. flashattn_ext/layout.py holds the same rule for the fake kernels.
inline std::vector<int64_t> dense_strides_like(const Tensor& like,
                                               const std::vector<int64_t>& sizes) {
  const int64_t rank = like.dim();
  std::vector<int64_t> slots, ordered;
  for (int64_t d = 0; d < rank; ++d) {
    if (like.size(d) > 1 && like.stride(d) != 0) slots.push_back(d);
  }
  ordered = slots;
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  std::vector<int64_t> memory_order(rank);
  for (int64_t d = 0; d < rank; ++d) memory_order[d] = d;
  for (size_t i = 0; i < slots.size(); ++i) memory_order[slots[i]] = ordered[i];

  std::vector<int64_t> strides(rank);
  int64_t stride = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[memory_order[i]] = stride;
    stride *= std::max<int64_t>(sizes[memory_order[i]], 1);
  }
  return strides;
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            ScalarType dtype, const Tensor& device_of) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(device_of.get(), &device_type));
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                  shim_dtype, device_type,
                                                  device_of.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_contiguous(const std::vector<int64_t>& sizes, ScalarType dtype,
                               const Tensor& device_of) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) {
    strides[i] = stride;
  }
  return empty_strided(sizes, strides, dtype, device_of);
}

// Of a tensor without holes. On the CPU without the dispatcher, which a short call would notice.
inline void fill_with_zeros(Tensor& tensor) {
  if (tensor.is_cpu()) {
    std::memset(tensor.mutable_data_ptr(), 0, tensor.numel() * tensor.element_size());
  } else {
    torch::stable::zero_(tensor);
  }
}

// What an output that nobody asked for looks like.
inline Tensor absent_output(ScalarType dtype, const Tensor& device_of) {
  return empty_contiguous({0}, dtype, device_of);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes(tensor.dim());
  for (int64_t d = 0; d < tensor.dim(); ++d) sizes[d] = tensor.size(d);
  return sizes;
}

// Scratch memory on the tensor's device; it lives as long as this object.
class TensorWorkspace {
 public:
  explicit TensorWorkspace(const Tensor& device_of) : device_of_(device_of) {}
  void* operator()(int64_t bytes) {
    memory_.push_back(empty_contiguous({bytes}, ScalarType::Byte, device_of_));
    return memory_.back().mutable_data_ptr();
  }

 private:
  const Tensor& device_of_;
  std::vector<Tensor> memory_;
};

}  // namespace flashattn::ops
