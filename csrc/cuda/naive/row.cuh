// A row of the matrices (batch, heads_q, len_q, len_k), and the threads that share it.
//
// A thread takes chunks of 8 neighbouring columns. The threads of a row hold kHeldChunks chunks
// each in registers; a longer row is taken in turns, and what is known of it waits in memory.
#pragma once

#include "core/problem.h"
#include "cuda/numeric.cuh"

namespace flashattn::cuda::naive {

inline constexpr int kChunk = 8;
template <class Real>
inline constexpr int kHeldChunks = sizeof(Real) == 8 ? 1 : 2;
inline constexpr int kMostThreads = 512;  // of a block

// 2^bits neighbouring threads share a row, four at least (see keep_bits); if more than a warp, they
// are the whole block.
struct Lanes {
  int bits;

  __device__ int count() const { return 1 << bits; }
  __device__ int own() const { return threadIdx.x & (count() - 1); }
  __device__ int64_t row() const {
    return int64_t{blockIdx.x} * (blockDim.x >> bits) + (threadIdx.x >> bits);
  }
};

// Joins a number of each thread of a row; all get the result. Called by whole blocks.
template <class Real, class Join>
__device__ Real join_row(Real number, Lanes lanes, const Join& join) {
  __shared__ Real warp_numbers[kMostThreads / 32];
  const int count = lanes.count();
  for (int distance = min(count, 32) / 2; distance > 0; distance /= 2) {
    number = join(number, __shfl_xor_sync(0xffffffffu, number, distance));
  }
  if (count <= 32) return number;
  __syncthreads();  // the numbers of the call before have been read
  if (threadIdx.x % 32 == 0) warp_numbers[threadIdx.x / 32] = number;
  __syncthreads();
  const int warps = count / 32;
  number = warp_numbers[threadIdx.x % warps];
  for (int distance = warps / 2; distance > 0; distance /= 2) {
    number = join(number, __shfl_xor_sync(0xffffffffu, number, distance));
  }
  return number;
}

template <class Real>
__device__ Real sum_of_row(Real number, Lanes lanes) {
  return join_row(number, lanes, [](Real a, Real b) { return a + b; });
}

// 64-bit division is long, and mostly 32 bits suffice.
__device__ __forceinline__ int64_t divide(int64_t value, int64_t by) {
  if ((static_cast<uint64_t>(value) | static_cast<uint64_t>(by)) >> 32) return value / by;
  return static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
}

// Which row it is; `seen` are the columns that causality, window and lengths leave (none for a row
// past the last).
struct RowPlace {
  int64_t index, batch, head, row;
  int64_t shift;
  Range seen;

  __device__ RowPlace(const AttentionProblem& p, int64_t row_index) : index(row_index) {
    const int64_t len_q = p.sequences.storage_q;
    const int64_t batch_head = divide(index, len_q);
    row = index - batch_head * len_q;
    batch = divide(batch_head, p.heads_q);
    head = batch_head - batch * p.heads_q;
    if (batch < p.sequences.count) {
      const Sequence sequence = p.sequences[batch];
      const SequenceMask mask = p.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
      shift = mask.shift;
      seen = mask.keys_for({row, row + 1});
    } else {
      batch = head = row = shift = 0;
      seen = {0, 0};
    }
  }

  // Columns [begin, end) of a chunk are seen.
  __device__ int begin_in(int64_t first) const { return clamp(seen.begin - first); }
  __device__ int end_in(int64_t first) const { return clamp(seen.end - first); }
  __device__ bool sees(int64_t first) const {
    return seen.begin < first + kChunk && first < seen.end;
  }

 private:
  __device__ static int clamp(int64_t place) {
    return static_cast<int>(place < 0 ? 0 : place > kChunk ? kChunk : place);
  }
};

// `count` elements of a chunk (0 for the others); by 16 bytes where `wide`, and then all of them.
template <class Element, class Real>
__device__ __forceinline__ void load_chunk(const Element* from, bool wide, int count,
                                           Real (&values)[kChunk]) {
  constexpr int kPart = Chunk<Element>::kSize;
  if (wide) {
#pragma unroll
    for (int i = 0; i < kChunk / kPart; ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i];
      widen(bit_cast<Chunk<Element>>(words), values + i * kPart);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values[i] = i < count ? convert<Real>(from[i]) : Real(0);
    }
  }
}

template <class Element, class Real>
__device__ __forceinline__ void store_chunk(Element* to, bool wide, int count,
                                            const Real (&values)[kChunk]) {
  constexpr int kPart = Chunk<Element>::kSize;
  if (wide) {
#pragma unroll
    for (int i = 0; i < kChunk / kPart; ++i) {
      Real part[kPart];
#pragma unroll
      for (int j = 0; j < kPart; ++j) part[j] = values[i * kPart + j];
      store_neighbours(to + i * kPart, part);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) to[i] = convert<Element>(values[i]);
    }
  }
}

// Dropout's decisions on a chunk, one bit each. The four neighbouring threads that share a block of
// 32 columns make one Philox call each, which decides two columns of every one of them: they
// exchange. Called by whole warps; not inlined, since it is long and called in many places.
__device__ __noinline__ uint32_t keep_bits(DropoutStream stream, int64_t row, int64_t first) {
  const int quarter = static_cast<int>(first / kChunk % 4);
  const DropoutNumbers numbers = stream.numbers(row, dropout_group(first) + quarter);
  uint32_t own = 0, bits = 0;
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    own |= static_cast<uint32_t>(numbers.number(slot) < stream.threshold) << slot;
  }
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint32_t theirs = __shfl_sync(0xffffffffu, own, group, 4);
    bits |= ((theirs >> (2 * quarter)) & 3u) << (2 * group);
  }
  return bits;
}

}  // namespace flashattn::cuda::naive
