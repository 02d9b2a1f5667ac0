// Argument errors: each names the argument, what was expected and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <sstream>
#include <string>

// FLASHATTN_CHECK(condition, "key_lengths", "shape (batch,) = (2,)", "(3,)")
#define FLASHATTN_CHECK(condition, argument, expected, got)                            \
  STD_TORCH_CHECK(condition, "flashattn_ext: ", (argument), ": expected ", (expected), \
                  ", but got ", (got))

namespace flashattn::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '(';
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.size(d);
  text << (tensor.dim() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string dtype_text(ScalarType dtype) { return torch::headeronly::toString(dtype); }

inline std::string device_text(const Tensor& tensor) {
  const std::string type = tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device";
  return tensor.is_cuda() ? type + ":" + std::to_string(tensor.get_device_index()) : type;
}

inline bool is_supported_float(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.device().type() == b.device().type() && a.get_device_index() == b.get_device_index();
}

}  // namespace flashattn::ops
