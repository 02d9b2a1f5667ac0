// softmax and log_softmax: check, convert, view as (outer, length, inner), allocate, run.
#include "cpu/softmax.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "core/softmax_problem.h"
#include "cuda/softmax.h"
#include "ops/checks.h"
#include "ops/devices.h"
#include "ops/tensors.h"

namespace flashattn::ops {
namespace {

constexpr const char* kFloatingDtypes = "dtype float16, bfloat16, float32 or float64";

// The dimension that the softmax runs along, counted from the front. A scalar counts as one row of
// one element, as in torch.
int64_t wrapped_dim(const Tensor& tensor, int64_t dim) {
  const int64_t rank = std::max<int64_t>(tensor.dim(), 1);
  FLASHATTN_CHECK(
      dim >= -rank && dim < rank, "dim",
      "a dimension in [" + std::to_string(-rank) + ", " + std::to_string(rank - 1) + "]", dim);
  return dim < 0 ? dim + rank : dim;
}

SoftmaxShape shape_around(const Tensor& tensor, int64_t dim) {
  SoftmaxShape shape;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    int64_t& part = d < dim ? shape.outer : d == dim ? shape.length : shape.inner;
    part *= tensor.size(d);
  }
  return shape;
}

// The dimensions before `dim` with neighbours in memory joined; nothing if too many remain.
std::optional<OuterLayout> outer_layout(const Tensor& tensor, int64_t dim) {
  OuterLayout layout;
  int rank = 0;
  for (int64_t d = 0; d < std::min(dim, tensor.dim()); ++d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d);
    if (size == 1) continue;
    if (rank > 0 && layout.stride[rank - 1] == size * stride) {
      layout.size[rank - 1] *= size;
      layout.stride[rank - 1] = stride;
    } else if (rank == OuterLayout::kMaxRank) {
      return std::nullopt;
    } else {
      layout.size[rank] = size;
      layout.stride[rank] = stride;
      ++rank;
    }
  }
  layout.rank = std::max(rank, 1);
  return layout;
}

// Kernels read rows (inner == 1) or columns whose elements are adjacent; nothing for other views.
std::optional<SoftmaxOperand> as_operand(const Tensor& tensor, int64_t dim,
                                         const SoftmaxShape& shape) {
  const auto outer = outer_layout(tensor, dim);
  if (!outer) return std::nullopt;
  int64_t expected = 1;
  for (int64_t d = tensor.dim() - 1; d > dim; --d) {
    if (tensor.size(d) == 1) continue;
    if (tensor.stride(d) != expected) return std::nullopt;
    expected *= tensor.size(d);
  }
  const int64_t length_stride = shape.length > 1 ? tensor.stride(dim) : 1;
  if (shape.inner == 1 && length_stride != 1) return std::nullopt;
  return SoftmaxOperand{tensor.const_data_ptr(), to_dtype(tensor.scalar_type()), *outer,
                        length_stride};
}

// A tensor that is read, and what keeps it alive: the caller's tensor or a contiguous copy.
struct ReadableOperand {
  Tensor tensor;
  SoftmaxOperand operand;

  ReadableOperand(const Tensor& caller, int64_t dim, const SoftmaxShape& shape) : tensor(caller) {
    auto view = as_operand(tensor, dim, shape);
    if (!view) {
      tensor = torch::stable::contiguous(tensor);
      view = as_operand(tensor, dim, shape);
    }
    operand = *view;
  }
};

SoftmaxResult as_result(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), to_dtype(tensor.scalar_type())};
}

Tensor forward(const char* op, SoftmaxKind kind, Tensor input, int64_t dim,
               std::optional<ScalarType> dtype) {
  dim = wrapped_dim(input, dim);
  if (dtype) {
    FLASHATTN_CHECK(is_supported_float(*dtype), "dtype", kFloatingDtypes, dtype_text(*dtype));
  } else {
    FLASHATTN_CHECK(is_supported_float(input.scalar_type()), "input",
                    std::string(kFloatingDtypes) + ", or an explicit dtype to convert it to",
                    dtype_text(input.scalar_type()));
  }
  const ScalarType result_dtype = dtype.value_or(input.scalar_type());
  const auto ignore = [](auto) {};
  if (!is_supported_float(input.scalar_type()) ||
      !with_softmax_forward_types(to_dtype(input.scalar_type()), to_dtype(result_dtype), ignore)) {
    input = torch::stable::to(input, result_dtype);
  }

  Tensor output = empty_contiguous(sizes_of(input), result_dtype, input);
  if (output.numel() == 0) return output;
  const SoftmaxShape shape = shape_around(input, dim);
  const ReadableOperand readable(input, dim, shape);
  const SoftmaxForwardProblem problem{kind, shape, readable.operand, as_result(output)};
  if (!input.is_cuda()) {
    cpu::softmax_forward(problem);
  } else if constexpr (kWithCuda) {
    cuda::softmax_forward(problem, input.get_device_index(), TensorWorkspace(input));
  } else {
    built_without_cuda(op);
  }
  return output;
}

Tensor backward(const char* op, SoftmaxKind kind, Tensor grad_output, Tensor output, int64_t dim,
                ScalarType input_dtype) {
  dim = wrapped_dim(output, dim);
  FLASHATTN_CHECK(is_supported_float(output.scalar_type()), "output", kFloatingDtypes,
                  dtype_text(output.scalar_type()));
  FLASHATTN_CHECK(is_supported_float(input_dtype), "input_dtype", kFloatingDtypes,
                  dtype_text(input_dtype));
  FLASHATTN_CHECK(grad_output.scalar_type() == output.scalar_type(), "grad_output",
                  "the dtype of output, " + dtype_text(output.scalar_type()),
                  dtype_text(grad_output.scalar_type()));
  FLASHATTN_CHECK(sizes_of(grad_output) == sizes_of(output), "grad_output",
                  "the shape of output, " + shape_text(output), shape_text(grad_output));
  FLASHATTN_CHECK(same_device(grad_output, output), "grad_output",
                  "the device of output, " + device_text(output), device_text(grad_output));

  const bool direct = with_softmax_backward_types(to_dtype(output.scalar_type()),
                                                  to_dtype(input_dtype), [](auto) {});
  Tensor grad_input =
      empty_contiguous(sizes_of(output), direct ? input_dtype : output.scalar_type(), output);
  if (grad_input.numel() > 0) {
    const SoftmaxShape shape = shape_around(output, dim);
    const ReadableOperand readable_grad(grad_output, dim, shape);
    const ReadableOperand readable_output(output, dim, shape);
    const SoftmaxBackwardProblem problem{kind, shape, readable_grad.operand,
                                         readable_output.operand, as_result(grad_input)};
    if (!output.is_cuda()) {
      cpu::softmax_backward(problem);
    } else if constexpr (kWithCuda) {
      cuda::softmax_backward(problem, output.get_device_index(), TensorWorkspace(output));
    } else {
      built_without_cuda(op);
    }
  }
  return direct ? grad_input : torch::stable::to(grad_input, input_dtype);
}

Tensor softmax(Tensor input, int64_t dim, std::optional<ScalarType> dtype) {
  return forward("softmax", SoftmaxKind::softmax, input, dim, dtype);
}
Tensor log_softmax(Tensor input, int64_t dim, std::optional<ScalarType> dtype) {
  return forward("log_softmax", SoftmaxKind::log_softmax, input, dim, dtype);
}
Tensor softmax_backward(Tensor grad_output, Tensor output, int64_t dim, ScalarType input_dtype) {
  return backward("softmax_backward", SoftmaxKind::softmax, grad_output, output, dim, input_dtype);
}
Tensor log_softmax_backward(Tensor grad_output, Tensor output, int64_t dim,
                            ScalarType input_dtype) {
  return backward("log_softmax_backward", SoftmaxKind::log_softmax, grad_output, output, dim,
                  input_dtype);
}

template <class Library>
void register_softmax(Library& library) {
  library.impl("softmax", TORCH_BOX(&softmax));
  library.impl("log_softmax", TORCH_BOX(&log_softmax));
  library.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  library.impl("log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

}  // namespace
}  // namespace flashattn::ops

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, library) {
  flashattn::ops::register_softmax(library);
}
STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, library) {
  flashattn::ops::register_softmax(library);
}
