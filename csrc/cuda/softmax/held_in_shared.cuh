// The chunks of a row that a block holds in shared memory: of any row. A thread reads back only
// what it has loaded itself, so no barrier is needed.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/softmax/row.cuh"

namespace flashattn::cuda {

template <class Direction>
class HeldInShared {
  using Read = typename Direction::Read;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Chunk<Read>::kSize;

 public:
  // `shared`: kOperands * capacity chunks.
  __device__ HeldInShared(void* shared, int capacity)
      : held_(static_cast<Chunk<Read>*>(shared)), capacity_(capacity) {}

  // Holds the chunks [begin, end) of `row`, at most `capacity` of them.
  __device__ void load(const Row<Direction>& row, int begin, int end) {
    begin_ = begin;
    count_ = end - begin;
    if (row.has_whole_chunks()) {
      for (int c = threadIdx.x; c < count_; c += blockDim.x)
        load_whole(row, c, (begin + c) * kChunk);
    } else {
      for (int c = threadIdx.x; c < count_; c += blockDim.x) load_any(row, c, row.first(begin + c));
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  __device__ typename Direction::State add_to(typename Direction::State state,
                                              const Direction& direction) const {
    for (int c = threadIdx.x; c < count_; c += blockDim.x) {
      Real x[Direction::kOperands][kChunk];
      widen_chunk(c, x);
      state = direction.add(state, x);
    }
    return state;
  }

  __device__ void store_results(const Direction& direction, const Row<Direction>& row,
                                typename Direction::Totals totals) const {
    const bool whole = row.has_whole_chunks() && row.has_whole_results();
    for (int c = threadIdx.x; c < count_; c += blockDim.x) {
      Real x[Direction::kOperands][kChunk], results[kChunk];
      widen_chunk(c, x);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) results[i] = direction.result(x, i, totals);
      const int first = row.first(begin_ + c);
      if (whole) {
        store_neighbours(row.result + first, results);
      } else {
        row.store(first, results);
      }
    }
  }

 private:
  __device__ void load_whole(const Row<Direction>& row, int c, int first) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) load_async(row, o, c, first);
  }
  __device__ void load_any(const Row<Direction>& row, int c, int first) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      if (row.is_whole(first) && is_aligned(row.operand[o] + first, 16)) {
        load_async(row, o, c, first);
      } else {
        held_[o * capacity_ + c] = row.load_elements(o, first);
      }
    }
  }
  __device__ void load_async(const Row<Direction>& row, int o, int c, int first) {
    ptx::cp_async_16(ptx::shared_address(held_ + o * capacity_ + c), row.operand[o] + first, true);
  }

  __device__ void widen_chunk(int c, Real (&x)[Direction::kOperands][kChunk]) const {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) widen(held_[o * capacity_ + c], x[o]);
  }

  Chunk<Read>* held_;  // (kOperands, capacity)
  int capacity_;
  int begin_ = 0, count_ = 0;
};

}  // namespace flashattn::cuda
