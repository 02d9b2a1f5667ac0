// Batched matrix products: cuBLAS, through the handle that torch keeps for its current device and
// stream. Not through torch's own matmul, whose precision is a switch of the process (TF32, sums in
// 16 bits), and which copies what it cannot read: csrc/notes/0011-naive-attention-on-cuda.md.
#pragma once

#include "core/dtype.h"
#include "core/tensor_view.h"
#include "cuda/device.h"

namespace flashattn::cuda::naive {

struct Matrices {
  UntypedView4 view;  // (batch, heads, rows, columns), of a layout that layout_of knows
  DType dtype;
};

class Products {
 public:
  explicit Products(const OpScope& scope);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // c = a * b, summed up in fp32 (fp64 for fp64). c is dense, and 0 where there is nothing to add.
  void multiply(const Matrices& a, const Matrices& b, const Matrices& c) const;

 private:
  const OpScope& scope_;
  void* handle_ = nullptr;  // cublasHandle_t
  int math_mode_ = 0;       // as it was
};

}  // namespace flashattn::cuda::naive
