// A row, or a piece of one, and the elements of it that a thread holds in registers.
#pragma once

#include <cstdint>

#include "cuda/numeric.cuh"
#include "cuda/softmax/direction.cuh"

namespace flashattn::cuda {

template <class Direction>
struct Row {
  const typename Direction::Read* operand[Direction::kOperands];  // (length)
  typename Direction::Written* result;                            // (length), contiguous
  int length;

  __device__ Row(const Tensors<Direction>& tensors, int64_t index, int64_t begin, int64_t end)
      : result(tensors.result + index * tensors.shape.length + begin),
        length(static_cast<int>(end - begin)) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      operand[o] = tensors.slab(o, index) + begin * tensors.operand[o].length_stride;
    }
  }

  // Drops the first elements.
  __device__ void advance(const Tensors<Direction>& tensors, int elements) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      operand[o] += elements * tensors.operand[o].length_stride;
    }
    result += elements;
    length -= elements;
  }
};

// How threads share a row: which elements a thread holds, given its number among `step` threads
// that hold neighbouring ones. WideAccess takes 16 bytes at a time, from rows that all begin at a
// multiple of 16 bytes and end at one; ElementAccess reads any row, of any stride.
struct WideAccess;
struct ElementAccess;

template <class Direction, class Access, int Count>
struct Fragment;

template <class Direction, int Count>
struct Fragment<Direction, WideAccess, Count> {
  using Read = typename Direction::Read;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Chunk<Read>::kSize;
  static_assert(Count % kChunk == 0);

  Real value[Direction::kOperands][Count];

  __device__ void load(const Tensors<Direction>&, const Row<Direction>& row, int thread,
                       int step) {
    Chunk<Read> chunk[Direction::kOperands][Count / kChunk];
#pragma unroll
    for (int k = 0; k < Count / kChunk; ++k) {
      const int first = (thread + k * step) * kChunk;
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        if (first < row.length) {
          chunk[o][k] = *reinterpret_cast<const Chunk<Read>*>(row.operand[o] + first);
        } else {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) {
            chunk[o][k].element[i] = convert<Read>(Direction::outside());
          }
        }
      }
    }
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        value[o][i] = convert<Real>(chunk[o][i / kChunk].element[i % kChunk]);
      }
    }
  }

  template <class Result>
  __device__ void store(const Row<Direction>& row, int thread, int step,
                        const Result& result) const {
#pragma unroll
    for (int k = 0; k < Count / kChunk; ++k) {
      const int first = (thread + k * step) * kChunk;
      if (first >= row.length) break;
      Real results[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) results[i] = result(k * kChunk + i);
      store_neighbours(row.result + first, results);
    }
  }
};

template <class Direction, int Count>
struct Fragment<Direction, ElementAccess, Count> {
  using Real = typename Direction::Real;

  Real value[Direction::kOperands][Count];

  __device__ void load(const Tensors<Direction>& tensors, const Row<Direction>& row, int thread,
                       int step) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      const int64_t stride = tensors.operand[o].length_stride;
      const auto* from = row.operand[o] + thread * stride;
#pragma unroll
      for (int i = 0; i < Count; ++i, from += step * stride) {
        const bool has = thread + i * step < row.length;
        value[o][i] = has ? convert<Real>(*from) : Direction::outside();
      }
    }
  }

  template <class Result>
  __device__ void store(const Row<Direction>& row, int thread, int step,
                        const Result& result) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const int element = thread + i * step;
      if (element >= row.length) break;
      row.result[element] = convert<typename Direction::Written>(result(i));
    }
  }
};

}  // namespace flashattn::cuda
