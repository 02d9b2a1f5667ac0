// A row, or a piece of one, in 16-byte chunks.
//
// Chunks are cut at the 16-byte boundaries of the first operand, so a row that begins anywhere
// still has whole chunks except at its two ends. A chunk that is not whole, or whose 16 bytes in
// another operand or in the result are not aligned, is accessed element by element.
#pragma once

#include <cstdint>

#include "cuda/numeric.cuh"
#include "cuda/ptx/load.cuh"
#include "cuda/softmax/direction.cuh"

namespace flashattn::cuda {

template <class Element>
__device__ bool is_aligned(const Element* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <class Direction>
struct Row {
  using Read = typename Direction::Read;
  using Written = typename Direction::Written;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Chunk<Read>::kSize;
  static constexpr int kResultBytes = kChunk * sizeof(Written) < 16 ? kChunk * sizeof(Written) : 16;

  const Read* operand[Direction::kOperands];  // (length)
  Written* result;                            // (length)
  int length;

  // Elements [begin, end) of row `index`: fewer than 2^31.
  __device__ Row(const Tensors<Direction>& tensors, int64_t index, int64_t begin, int64_t end)
      : result(tensors.result + index * tensors.shape.length + begin),
        length(static_cast<int>(end - begin)) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) operand[o] = tensors.slab(o, index) + begin;
  }

  // Elements between the boundary below the row and the row.
  __device__ int lead() const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(operand[0]) % 16 / sizeof(Read));
  }
  __device__ int chunks() const { return (lead() + length + kChunk - 1) / kChunk; }
  // The first element of a chunk; negative for one that begins before the row.
  __device__ int first(int chunk) const { return chunk * kChunk - lead(); }

  // The whole chunks of a row whose operands and result lie alike to the boundaries.
  __device__ int before_whole_part() const { return min((kChunk - lead()) % kChunk, length); }
  __device__ Row whole_part() const {
    Row part = *this;
    const int before = before_whole_part();
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) part.operand[o] += before;
    part.result += before;
    part.length = (length - before) / kChunk * kChunk;
    return part;
  }

  // No chunk needs access element by element.
  __device__ bool has_whole_chunks() const {
    bool whole = length % kChunk == 0;
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) whole &= is_aligned(operand[o], 16);
    return whole;
  }
  __device__ bool has_whole_results() const { return is_aligned(result, kResultBytes); }

  __device__ bool is_whole(int first) const { return first >= 0 && first + kChunk <= length; }
  __device__ bool has(int element) const { return element >= 0 && element < length; }

  // Asks for the chunks [begin, end) of the first operands, to be in the L2 cache when they are
  // loaded.
  __device__ void prefetch(int begin, int end) const {
#pragma unroll
    for (int o = 0; o < Direction::kAhead; ++o) {
      const auto address = reinterpret_cast<uintptr_t>(operand[o]) / 16 * 16;
      if (end > begin) ptx::prefetch_to_l2(address + begin * uintptr_t{16}, 16 * (end - begin));
    }
  }

  __device__ Chunk<Read> load_elements(int o, int first) const {
    Chunk<Read> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const bool exists = has(first + i);
      chunk.element[i] = exists ? operand[o][first + i] : convert<Read>(Direction::outside());
    }
    return chunk;
  }

  __device__ void store(int first, const Real (&values)[kChunk]) const {
    if (is_whole(first) && is_aligned(result + first, kResultBytes)) {
      store_neighbours(result + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (has(first + i)) result[first + i] = convert<Written>(values[i]);
      }
    }
  }
};

}  // namespace flashattn::cuda
