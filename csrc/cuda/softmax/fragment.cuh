// The elements of a row that a thread holds in registers, in the type that is computed in.
//
// `thread` is the thread's number among `step` threads that share the row. WideAccess takes 16
// bytes at a time and needs rows that begin and end at multiples of 16 bytes; ElementAccess reads
// any row.
#pragma once

#include "cuda/ptx/load.cuh"
#include "cuda/softmax/row.cuh"

namespace flashattn::cuda {

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

  __device__ void load(const Row<Direction>& row, int thread, int step) {
    const uint32_t outside = Chunk<Read>::word_of(convert<Read>(Direction::outside()));
    uint4 words[Direction::kOperands][Count / kChunk];
#pragma unroll
    for (int k = 0; k < Count / kChunk; ++k) {
      const int first = (thread + k * step) * kChunk;
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        words[o][k] = ptx::load_16(row.operand[o] + first, first < row.length, outside);
      }
    }
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
#pragma unroll
      for (int k = 0; k < Count / kChunk; ++k) {
        widen(bit_cast<Chunk<Read>>(words[o][k]), value[o] + k * kChunk);
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

  __device__ void load(const Row<Direction>& row, int thread, int step) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const int element = thread + i * step;
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        const bool has = element < row.length;
        value[o][i] = has ? convert<Real>(row.operand[o][element]) : Direction::outside();
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
