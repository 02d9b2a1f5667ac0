// The chunks of a row that a block holds in registers as far as they go, and in shared memory: of
// rows that begin and end at multiples of 16 bytes and would need many blocks otherwise.
#pragma once

#include "cuda/softmax/held_in_registers.cuh"
#include "cuda/softmax/held_in_shared.cuh"

namespace flashattn::cuda {

template <class Direction>
class HeldInBoth {
  static constexpr int kThreadChunks = HeldInRegisters<Direction>::kThreadChunks;

 public:
  // `shared`: kOperands * (capacity - blockDim.x * kThreadChunks) chunks.
  __device__ HeldInBoth(void* shared, int capacity)
      : in_registers_(nullptr, 0),
        in_shared_(shared, capacity - static_cast<int>(blockDim.x) * kThreadChunks) {}

  __device__ void load(const Row<Direction>& row, int begin, int end) {
    const int middle = min(begin + static_cast<int>(blockDim.x) * kThreadChunks, end);
    in_registers_.load(row, begin, middle);
    in_shared_.load(row, middle, end);
  }
  __device__ typename Direction::State add_to(typename Direction::State state,
                                              const Direction& direction) const {
    return in_shared_.add_to(in_registers_.add_to(state, direction), direction);
  }
  __device__ void store_results(const Direction& direction, const Row<Direction>& row,
                                typename Direction::Totals totals) const {
    in_registers_.store_results(direction, row, totals);
    in_shared_.store_results(direction, row, totals);
  }

 private:
  HeldInRegisters<Direction> in_registers_;
  HeldInShared<Direction> in_shared_;
};

}  // namespace flashattn::cuda
