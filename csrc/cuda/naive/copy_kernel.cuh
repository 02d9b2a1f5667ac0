// A copy of views that a BLAS cannot read or write, or of which it must not read everything.
#pragma once

#include "cuda/naive/row.cuh"

namespace flashattn::cuda::naive {

// Four indices, from that of an element in the order of memory.
struct Place4 {
  int64_t at[4];

  __device__ Place4(int64_t index, const int64_t (&size)[4]) {
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const int64_t next = divide(index, size[d]);
      at[d] = index - next * size[d];
      index = next;
    }
  }
  __device__ int64_t offset_in(const UntypedView4& view) const {
    int64_t offset = 0;
#pragma unroll
    for (int d = 0; d < 4; ++d) offset += at[d] * view.stride[d];
    return offset;
  }
};

// Element by element, in the order of `to`'s indices. With `lengths`, rows past a batch entry's are
// 0 whatever they hold. Word: of the size of an element.
template <class Word>
__global__ void __launch_bounds__(256)
    naive_copy_kernel(UntypedView4 from, UntypedView4 to, Sequences lengths, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= count) return;
  const Place4 place(index, to.size);
  const bool used = !lengths.key_lengths || place.at[2] < lengths[place.at[0]].len_k;
  static_cast<Word*>(to.data)[place.offset_in(to)] =
      used ? static_cast<const Word*>(from.data)[place.offset_in(from)] : Word(0);
}

}  // namespace flashattn::cuda::naive
