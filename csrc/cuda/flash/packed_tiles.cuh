// Which tile of which packed sequence a block owns.
#pragma once

#include "core/sequences.h"

namespace flashattn::cuda {

// Packed sequences begin at tiles of their own: sequence s has the tiles from begin(s) / size + s
// on, of which at most one stays empty. So tiles are numbered without sums over the lengths, and
// there are at most total / size + count of them.
struct SequenceTile {
  int sequence;
  int first;  // row or key, inside the sequence
};

inline int64_t packed_tiles(int64_t total, int64_t count, int size) {
  return count == 0 ? 0 : total / size + count;
}

#if defined(__CUDACC__)
// The last sequence whose tiles begin at `index` or before. Called by whole warps: each lane looks
// at one of 32 candidates, so up to 32 sequences take one load.
__device__ __forceinline__ SequenceTile sequence_tile(const IntegerList& begins, int64_t total,
                                                      int count, int size, int index) {
  const auto first_tile = [&](int sequence) {
    const int64_t begin = min(max(begins[sequence], int64_t{0}), total);
    return static_cast<int>(begin / size) + sequence;
  };
  const int lane = threadIdx.x % 32;
  int first = 0, candidates = count;
  while (candidates > 1) {
    const int step = (candidates + 31) / 32, offset = lane * step;
    const bool before = offset < candidates && first_tile(first + offset) <= index;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, before) | 1);
    first += last * step;
    candidates = min(candidates - last * step, step);
  }
  return {first, (index - first_tile(first)) * size};
}

#endif

}  // namespace flashattn::cuda
