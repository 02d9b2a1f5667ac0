// Dropout on fragments: one Philox call decides eight elements of a query row.
#pragma once

#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

// Calls visit(slot, kept) for the eight elements that one Philox call decides. A number is compared
// where it is the high half of a word: the word is below the threshold's when its high half is. A
// threshold of 0 has no last word; what is visited then does not count, since keep_scale is 0.
template <class Visit>
__device__ __forceinline__ void visit_call(const DropoutStream& stream, int row, int group,
                                           const Visit& visit) {
  const DropoutNumbers numbers = stream.numbers(row, group);
  const uint32_t last = (stream.threshold << 16) - 1;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = numbers.words.word[w];
    visit(2 * w, word << 16 <= last);
    visit(2 * w + 1, word <= last);
  }
}

// Calls visit(block, element, kept) for every element of a fragment. Its first key is a multiple
// of 32.
template <int Blocks, class Visit>
__device__ __forceinline__ void visit_dropout(const DropoutStream& stream, const RowPosition& at,
                                              const Visit& visit) {
  static_assert(Blocks % 4 == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int b = 0; b < Blocks; b += 4) {
      const int group = static_cast<int>(dropout_group(at.key + 8 * b));
      visit_call(stream, at.row + 8 * half, group,
                 [&](int slot, bool kept) { visit(b + slot / 2, 2 * half + slot % 2, kept); });
    }
  }
}

// A transposed fragment has few of a call's eight elements together. There the block decides for
// the whole tile first: one byte a call, laid out so that what a lane needs of eight rows is
// neighbouring. Rows r of a tile are stored by (r / 2 % 4), then r / 8, then r % 2.
template <int Rows, int Keys>
struct DropoutTile {
  static_assert(Rows % 8 == 0 && Keys % 32 == 0);
  alignas(16) uint8_t bits[Keys / 8][Rows];

  __device__ static int place(int row) { return row / 2 % 4 * (Rows / 4) + row / 8 * 2 + row % 2; }

  // Called by all threads of a block, then a barrier. `row` and `key` are the tile's first.
  // Unrolled where several blocks share a multiprocessor: their warps fill each other's waits.
  template <int Threads>
  __device__ void fill(const DropoutStream& stream, int row, int key) {
    constexpr int kCalls = Keys / 8 * Rows / Threads;
    static_assert(kCalls * Threads == Keys / 8 * Rows);
#pragma unroll(Threads <= 128 ? kCalls : 1)
    for (int call = 0; call < kCalls; ++call) {
      const int i = call * Threads + threadIdx.x;
      const int r = i % Rows, group = i / Rows;
      uint32_t byte = 0;
      visit_call(stream, row + r, key / 8 + group,
                 [&](int slot, bool kept) { byte |= uint32_t{kept} << slot; });
      bits[group][place(r)] = static_cast<uint8_t>(byte);
    }
  }

  // Calls visit(block, element, kept) for every element of a fragment; `at` counts from the tile's
  // first row and key.
  template <int Blocks, class Visit>
  __device__ __forceinline__ void visit(const KeyPosition& at, const Visit& visit) const {
    static_assert(Blocks % 2 == 0);
    const uint8_t* bytes = &bits[dropout_group(at.key)][place(at.row)];
#pragma unroll
    for (int b = 0; b < Blocks; b += 2) {
      // Keys 8 apart are decided by bits 2 apart of the same call.
      const uint32_t word =
          *reinterpret_cast<const uint32_t*>(bytes + 2 * b) >> dropout_slot(at.key);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int block = b + i / 4, e = i % 4;
        visit(block, e, word >> (8 * (i / 4 * 2 + e % 2) + e / 2 * 2) & 1);
      }
    }
  }
};

}  // namespace flashattn::cuda
