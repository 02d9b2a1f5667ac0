// Softmax over one dimension, as every kernel sees it: tensors of shape (outer, length, inner), the
// softmax running along `length`.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"

namespace flashattn {

enum class SoftmaxKind : uint8_t { softmax, log_softmax };

// Where slab `o` of a tensor begins: the outer dimensions, those that follow each other in memory
// already joined, slowest first.
struct OuterLayout {
  static constexpr int kMaxRank = 4;

  int rank = 1;
  int64_t size[kMaxRank] = {1};
  int64_t stride[kMaxRank] = {0};

  FLASHATTN_HD int64_t offset(int64_t index) const {
    int64_t result = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // 64-bit divisions are large, and mostly there are none
#endif
    for (int d = rank - 1; d > 0; --d) {
      result += index % size[d] * stride[d];
      index /= size[d];
    }
    return result + index * stride[0];
  }
};

// A tensor that is read: element (o, l, i) lies at data + outer.offset(o) + l * length_stride + i.
// With inner == 1, length_stride is 1.
struct SoftmaxOperand {
  const void* data = nullptr;
  DType dtype = DType::float32;
  OuterLayout outer;
  int64_t length_stride = 1;
};

// A tensor that is written: (outer, length, inner), contiguous.
struct SoftmaxResult {
  void* data = nullptr;
  DType dtype = DType::float32;
};

struct SoftmaxShape {
  int64_t outer = 1, length = 1, inner = 1;
};

struct SoftmaxForwardProblem {
  SoftmaxKind kind;
  SoftmaxShape shape;
  SoftmaxOperand input;
  SoftmaxResult output;
};

struct SoftmaxBackwardProblem {
  SoftmaxKind kind;
  SoftmaxShape shape;
  SoftmaxOperand grad_output, output;  // of one dtype
  SoftmaxResult grad_input;
};

// The pairs (type read, type written) that have kernels: equal ones, a 16-bit input with an fp32
// result, and the gradient of that. Calls body(TypePair<Read, Written>{}); false for other pairs.
template <class Read, class Written>
struct TypePair {};

template <class Body>
bool with_softmax_forward_types(DType input, DType output, const Body& body) {
  const auto is = [&](DType read, DType written) { return input == read && output == written; };
  if (is(DType::float16, DType::float16)) return body(TypePair<float16, float16>{}), true;
  if (is(DType::float16, DType::float32)) return body(TypePair<float16, float>{}), true;
  if (is(DType::bfloat16, DType::bfloat16)) return body(TypePair<bfloat16, bfloat16>{}), true;
  if (is(DType::bfloat16, DType::float32)) return body(TypePair<bfloat16, float>{}), true;
  if (is(DType::float32, DType::float32)) return body(TypePair<float, float>{}), true;
  if (is(DType::float64, DType::float64)) return body(TypePair<double, double>{}), true;
  return false;
}

template <class Body>
bool with_softmax_backward_types(DType output, DType input, const Body& body) {
  return with_softmax_forward_types(
      input, output, [&]<class In, class Out>(TypePair<In, Out>) { body(TypePair<Out, In>{}); });
}

}  // namespace flashattn
