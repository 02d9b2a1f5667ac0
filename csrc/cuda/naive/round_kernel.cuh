// The output of 16-bit types, from its fp32 sums.
#pragma once

#include "cuda/naive/copy_kernel.cuh"

namespace flashattn::cuda::naive {

// exact: (batch, heads_q, len_q, head_dim_v) contiguous; corrections: (batch, heads_q, len_q).
template <class Element>
__global__ void __launch_bounds__(256)
    naive_round_kernel(UntypedView4 exact, const float* corrections, UntypedView4 out,
                       int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= count) return;
  const Place4 place(index, exact.size);
  const float value = static_cast<const float*>(exact.data)[index];
  static_cast<Element*>(out.data)[place.offset_in(out)] =
      convert<Element>(value * corrections[divide(index, exact.size[3])]);
}

}  // namespace flashattn::cuda::naive
