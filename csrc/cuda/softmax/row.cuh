// Rows as 16-byte chunks.
//
// Chunks are cut at the 16-byte boundaries of the first operand, so a row that begins anywhere
// still has whole chunks except at its two ends. A chunk that is not whole, or whose 16 bytes in
// another operand or in the result are not aligned, is accessed element by element.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "cuda/numeric.cuh"
#include "cuda/softmax/direction.cuh"

namespace flashattn::cuda {

template <class Element>
__device__ bool is_aligned(const Element* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Element i of operand o of one chunk, for Direction::add and Direction::result.
template <class Direction>
struct ChunkElements {
  const Chunk<typename Direction::Read> (&chunk)[Direction::kOperands];

  __device__ auto operator()(int o, int i) const {
    return convert<typename Direction::Real>(chunk[o].element[i]);
  }
};

// A row, or a piece of one: fewer than 2^31 elements.
template <class Direction>
struct Row {
  using Read = typename Direction::Read;
  using Written = typename Direction::Written;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Chunk<Read>::kSize;
  using OperandChunks = Chunk<Read>[Direction::kOperands];

  const Read* operand[Direction::kOperands];  // (length)
  Written* result;                            // (length)
  int length;
  int lead;  // elements between the boundary below the row and the row

  Row() = default;
  __device__ Row(const Tensors<Direction>& tensors, int64_t index, int64_t begin, int64_t end)
      : result(tensors.result + index * tensors.shape.length + begin),
        length(static_cast<int>(end - begin)) {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) operand[o] = tensors.slab(o, index) + begin;
    lead = static_cast<int>(reinterpret_cast<uintptr_t>(operand[0]) % 16 / sizeof(Read));
  }

  __device__ int chunks() const { return (lead + length + kChunk - 1) / kChunk; }
  // The first element of a chunk; negative for one that begins before the row.
  __device__ int first(int chunk) const { return chunk * kChunk - lead; }
  __device__ bool is_whole(int first) const { return first >= 0 && first + kChunk <= length; }
  __device__ bool has(int element) const { return element >= 0 && element < length; }

  // Whether load_whole may be used.
  __device__ bool can_load_whole(int o, int first) const {
    return is_whole(first) && is_aligned(operand[o] + first, 16);
  }
  __device__ Chunk<Read> load_whole(int o, int first) const {
    return bit_cast<Chunk<Read>>(__ldcs(reinterpret_cast<const uint4*>(operand[o] + first)));
  }
  __device__ void load_whole_async(int o, int first, Chunk<Read>* to) const {
    __pipeline_memcpy_async(to, operand[o] + first, 16);
  }
  __device__ Chunk<Read> load_elements(int o, int first) const {
    Chunk<Read> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk.element[i] = has(first + i) ? operand[o][first + i] : Direction::outside();
    }
    return chunk;
  }

  __device__ void store(const Direction& direction, int first, const OperandChunks& chunks,
                        typename Direction::Totals totals) const {
    Real values[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] = direction.result(ChunkElements<Direction>{chunks}, i, totals);
    }
    constexpr int kBytes = kChunk * sizeof(Written) < 16 ? kChunk * sizeof(Written) : 16;
    if (is_whole(first) && is_aligned(result + first, kBytes)) {
      store_whole(result + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (has(first + i)) result[first + i] = convert<Written>(values[i]);
      }
    }
  }

 private:
  __device__ static void store_whole(Written* to, const Real (&values)[kChunk]) {
    if constexpr (sizeof(Written) == 2) {
      uint32_t pairs[kChunk / 2];
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        pairs[i] = round_pair(values[2 * i], values[2 * i + 1], Written());
      }
      if constexpr (kChunk == 8) {
        __stcs(reinterpret_cast<uint4*>(to), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      } else {
        __stcs(reinterpret_cast<uint2*>(to), make_uint2(pairs[0], pairs[1]));
      }
    } else {
      constexpr int kSize = Chunk<Written>::kSize;
#pragma unroll
      for (int i = 0; i < kChunk; i += kSize) {
        Chunk<Written> chunk;
#pragma unroll
        for (int j = 0; j < kSize; ++j) chunk.element[j] = values[i + j];
        __stcs(reinterpret_cast<uint4*>(to + i), bit_cast<uint4>(chunk));
      }
    }
  }
};

}  // namespace flashattn::cuda
