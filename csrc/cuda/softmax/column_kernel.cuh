// The kernel for inner > 1: neighbouring threads hold neighbouring columns, so accesses coalesce
// although a column's elements lie `inner` apart.
#pragma once

#include "cuda/ptx/opaque.cuh"
#include "cuda/softmax/direction.cuh"
#include "cuda/softmax/fragment.cuh"

namespace flashattn::cuda {

// Neighbouring columns that a thread loads at once: two (more would be too many States), or one. In
// memory's own words, since a struct of 16-bit elements would take a register for each.
template <class Access, class Element>
struct ColumnPack {
  static constexpr int kColumns = 1;
  Element element;

  __device__ static ColumnPack load(const Element* from) { return {*from}; }
  __device__ static ColumnPack of(Element element) { return {element}; }
  template <class Real>
  __device__ void widen(Real (&values)[kColumns]) const {
    values[0] = convert<Real>(element);
  }
};

template <class Element>
  requires(sizeof(Element) == 2)
struct ColumnPack<WideAccess, Element> {
  static constexpr int kColumns = 2;
  uint32_t word;

  __device__ static ColumnPack load(const Element* from) {
    return {*reinterpret_cast<const uint32_t*>(from)};
  }
  __device__ static ColumnPack of(Element element) { return {element.bits * 0x10001u}; }
  // Computed again each time, not kept in registers.
  __device__ void widen(float (&values)[kColumns]) const {
    const float2 pair = unpack(ptx::opaque(word), Element());
    values[0] = pair.x;
    values[1] = pair.y;
  }
};

template <>
struct ColumnPack<WideAccess, float> {
  static constexpr int kColumns = 2;
  float2 pair;

  __device__ static ColumnPack load(const float* from) {
    return {*reinterpret_cast<const float2*>(from)};
  }
  __device__ static ColumnPack of(float element) { return {{element, element}}; }
  __device__ void widen(float (&values)[kColumns]) const {
    values[0] = pair.x;
    values[1] = pair.y;
  }
};

// Lines that a thread holds in registers: as many as leave room for two blocks, or a few elements.
template <class Direction, class Access>
inline constexpr int kColumnLines = 4;
template <class Direction>
inline constexpr int kColumnLines<Direction, WideAccess> =
    sizeof(typename Direction::Read) == 4 ? 16 / Direction::kOperands
    : Direction::kOperands == 1           ? 32
                                          : 12;

// A block holds `lanes` packs of neighbouring columns and blockDim / lanes lines at a time. A
// column of up to blockDim / lanes * kLines elements stays in registers; a longer one is read
// twice.
template <class Direction, class Access>
__global__ void __launch_bounds__(512, sizeof(typename Direction::Read) < 8 ? 2 : 1)
    softmax_column_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                          int lanes) {
  using Read = typename Direction::Read;
  using Written = typename Direction::Written;
  using Real = typename Direction::Real;
  using State = typename Direction::State;
  using Pack = ColumnPack<Access, Read>;
  constexpr int kColumns = Pack::kColumns, kLines = kColumnLines<Direction, Access>;
  constexpr int kGroup = 8 / Direction::kOperands < kLines ? 8 / Direction::kOperands : kLines;
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
        data[o][k] = l < length ? Pack::load(operand[o] + l * tensors.operand[o].length_stride)
                                : Pack::of(convert<Read>(Direction::outside()));
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
    for (int group = 0; group < kLines; group += kGroup) {
      Real x[kColumns][Direction::kOperands][kGroup];
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          Real values[kColumns];
          data[o][group + k].widen(values);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) x[c][o][k] = values[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state[c] = direction.add(state[c], x[c]);
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
      Real x[kColumns][Direction::kOperands][1], results[kColumns];
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        Real values[kColumns];
        data[o][k].widen(values);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) x[c][o][0] = values[c];
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) results[c] = direction.result(x[c], 0, totals[c]);
      store_neighbours(result + l * shape.inner, results);
    }
  }
}

}  // namespace flashattn::cuda
