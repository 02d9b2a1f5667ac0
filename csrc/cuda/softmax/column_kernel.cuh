// The kernel for inner > 1: neighbouring threads hold neighbouring columns, so accesses coalesce
// although a column's elements lie `inner` apart.
#pragma once

#include "cuda/softmax/direction.cuh"
#include "cuda/softmax/fragment.cuh"

namespace flashattn::cuda {

// Neighbouring columns that a thread loads at once: 8 bytes of them (16 would be too many States),
// or one.
template <class Access, class Element>
inline constexpr int kPackColumns = 1;
template <class Element>
inline constexpr int kPackColumns<WideAccess, Element> = 8 / sizeof(Element);

// Lines that a thread holds in registers.
template <class Direction>
inline constexpr int kColumnLines = 4;

// A block holds `lanes` packs of neighbouring columns and blockDim / lanes lines at a time. A
// column of up to blockDim / lanes * kLines elements stays in registers; a longer one is read
// twice.
template <class Direction, class Access>
__global__ void __launch_bounds__(512)
    softmax_column_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                          int lanes) {
  using Read = typename Direction::Read;
  using Written = typename Direction::Written;
  using Real = typename Direction::Real;
  using State = typename Direction::State;
  constexpr int kColumns = kPackColumns<Access, Read>, kLines = kColumnLines<Direction>;
  struct alignas(kColumns * sizeof(Read)) Pack {
    Read element[kColumns];
  };
  extern __shared__ __align__(16) unsigned char shared[];
  State* const states = reinterpret_cast<State*>(shared);  // (kColumns, blockDim)

  const SoftmaxShape shape = tensors.shape;
  const int lines = blockDim.x / lanes;
  const int lane = threadIdx.x % lanes, line = threadIdx.x / lanes;
  const int64_t column = (int64_t{blockIdx.x} * lanes + lane) * kColumns;  // of outer * inner
  const bool exists = column < shape.outer * shape.inner;
  const int64_t slab = exists ? column / shape.inner : 0;
  const int64_t inner = exists ? column % shape.inner : 0;
  const int64_t length = exists ? shape.length : 0;

  const Read* operand[Direction::kOperands];
#pragma unroll
  for (int o = 0; o < Direction::kOperands; ++o) operand[o] = tensors.slab(o, slab) + inner;
  Written* const result = tensors.result + slab * shape.length * shape.inner + inner;

  Pack data[Direction::kOperands][kLines];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int64_t l = first + int64_t{k} * lines;
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        if (l < length) {
          const Read* from = operand[o] + l * tensors.operand[o].length_stride;
          data[o][k] = *reinterpret_cast<const Pack*>(from);
        } else {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            data[o][k].element[c] = convert<Read>(Direction::outside());
          }
        }
      }
    }
  };

  State state[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) state[c] = Direction::empty();
  const int64_t step = int64_t{lines} * kLines;
  for (int64_t first = line; first < shape.length; first += step) {
    load(first);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Real x[Direction::kOperands][kLines];
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
#pragma unroll
        for (int k = 0; k < kLines; ++k) x[o][k] = convert<Real>(data[o][k].element[c]);
      }
      state[c] = direction.add(state[c], x);
    }
  }

  // Halve the lines until the first one has the whole columns.
#pragma unroll
  for (int c = 0; c < kColumns; ++c) states[c * blockDim.x + threadIdx.x] = state[c];
  for (int half = lines / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line < half) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        State& mine = states[c * blockDim.x + threadIdx.x];
        mine = Direction::join(mine, states[c * blockDim.x + threadIdx.x + half * lanes]);
      }
    }
  }
  __syncthreads();
  typename Direction::Totals totals[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) totals[c] = direction.totals(states[c * blockDim.x + lane]);

  const bool in_registers = shape.length <= step;
  for (int64_t first = line; first < length; first += step) {
    if (!in_registers) load(first);
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int64_t l = first + int64_t{k} * lines;
      if (l >= length) break;
      Real results[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        Real x[Direction::kOperands][1];
#pragma unroll
        for (int o = 0; o < Direction::kOperands; ++o) {
          x[o][0] = convert<Real>(data[o][k].element[c]);
        }
        results[c] = direction.result(x, 0, totals[c]);
      }
      store_neighbours(result + l * shape.inner, results);
    }
  }
}

}  // namespace flashattn::cuda
