// The kernel for inner > 1: neighbouring threads hold neighbouring columns, so accesses coalesce
// although a column's elements lie `inner` apart.
#pragma once

#include "cuda/softmax/direction.cuh"

namespace flashattn::cuda {

// How a thread accesses a line: 16 bytes of neighbouring columns, or one element.
struct WideAccess {
  template <class Element>
  static constexpr int kColumns = Chunk<Element>::kSize;
};
struct ElementAccess {
  template <class Element>
  static constexpr int kColumns = 1;
};

// `Columns` neighbouring elements, loaded and stored at once.
template <class Element, int Columns>
struct alignas(Columns * sizeof(Element) < 16 ? Columns * sizeof(Element) : 16) Pack {
  Element element[Columns];
};

inline constexpr int kColumnLines = 4;  // lines that a thread keeps in registers

// A block holds `lanes` packs of neighbouring columns and blockDim / lanes lines at a time. A
// column of up to blockDim / lanes * kColumnLines elements stays in registers; a longer one is read twice.
template <class Direction, class Access>
__global__ void __launch_bounds__(512)
    softmax_column_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                          int lanes) {
  using Read = typename Direction::Read;
  using Real = typename Direction::Real;
  using State = typename Direction::State;
  constexpr int kColumns = Access::template kColumns<Read>;
  constexpr int kLines = kColumnLines;
  using ReadPack = Pack<Read, kColumns>;
  using WrittenPack = Pack<typename Direction::Written, kColumns>;
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
  for (int o = 0; o < Direction::kOperands; ++o) operand[o] = tensors.slab(o, slab) + inner;
  typename Direction::Written* const result =
      tensors.result + slab * shape.length * shape.inner + inner;

  ReadPack data[Direction::kOperands][kLines];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int64_t l = first + int64_t{k} * lines;
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        if (l < length) {
          data[o][k] = *reinterpret_cast<const ReadPack*>(
              operand[o] + l * tensors.operand[o].length_stride);
        } else {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) data[o][k].element[c] = Direction::outside();
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
      state[c] = direction.template add<kLines>(
          state[c], [&](int o, int k) { return convert<Real>(data[o][k].element[c]); });
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
      WrittenPack pack;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const auto x = [&](int o, int) { return convert<Real>(data[o][k].element[c]); };
        pack.element[c] = convert<typename Direction::Written>(direction.result(x, 0, totals[c]));
      }
      *reinterpret_cast<WrittenPack*>(result + l * shape.inner) = pack;
    }
  }
}

}  // namespace flashattn::cuda
