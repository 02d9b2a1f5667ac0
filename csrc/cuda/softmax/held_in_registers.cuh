// The chunks of a row that a block holds in registers, as they came from memory, so that 16-bit
// elements take 16 bits: only of rows that begin and end at multiples of 16 bytes.
#pragma once

#include "cuda/ptx/load.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/softmax/row.cuh"

namespace flashattn::cuda {

template <class Direction>
class HeldInRegisters {
  using Read = typename Direction::Read;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Chunk<Read>::kSize;
  static constexpr int kGroup = 16 / kChunk;  // chunks that are widened together

 public:
  static constexpr int kThreadChunks = 8 / Direction::kOperands;  // 128 bytes in all

  __device__ HeldInRegisters(void*, int) {}

  // Holds the chunks [begin, end) of `row`, at most blockDim.x * kThreadChunks of them.
  __device__ void load(const Row<Direction>& row, int begin, int end) {
    begin_ = begin;
    end_ = end;
    const uint32_t outside = Chunk<Read>::word_of(convert<Read>(Direction::outside()));
#pragma unroll
    for (int k = 0; k < kThreadChunks; ++k) {
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        const int c = chunk_of(k);
        held_[o][k] = ptx::load_16(row.operand[o] + c * kChunk, c < end_, outside);
      }
    }
  }

  __device__ typename Direction::State add_to(typename Direction::State state,
                                              const Direction& direction) const {
#pragma unroll
    for (int k = 0; k < kThreadChunks; k += kGroup) {
      Real x[Direction::kOperands][kGroup * kChunk];
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          widen(bit_cast<Chunk<Read>>(held_[o][k + g]), x[o] + g * kChunk);
        }
      }
      state = direction.add(state, x);
    }
    return state;
  }

  __device__ void store_results(const Direction& direction, const Row<Direction>& row,
                                typename Direction::Totals totals) const {
#pragma unroll
    for (int k = 0; k < kThreadChunks; ++k) {
      if (chunk_of(k) >= end_) break;
      Real x[Direction::kOperands][kChunk], results[kChunk];
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        widen(bit_cast<Chunk<Read>>(again(held_[o][k])), x[o]);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) results[i] = direction.result(x, i, totals);
      store_neighbours(row.result + chunk_of(k) * kChunk, results);
    }
  }

 private:
  __device__ int chunk_of(int k) const { return begin_ + threadIdx.x + k * blockDim.x; }

  __device__ static uint4 again(uint4 words) {
    return {ptx::opaque(words.x), ptx::opaque(words.y), ptx::opaque(words.z), ptx::opaque(words.w)};
  }

  uint4 held_[Direction::kOperands][kThreadChunks];
  int begin_ = 0, end_ = 0;
};

}  // namespace flashattn::cuda
