// Dropout on fragments: one Philox call decides eight elements of a query row.
#pragma once

#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

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
      const DropoutNumbers numbers =
          stream.numbers(at.row + 8 * half, dropout_group(at.key + 8 * b));
#pragma unroll
      for (int slot = 0; slot < 8; ++slot) {
        visit(b + slot / 2, 2 * half + slot % 2, numbers.number(slot) < stream.threshold);
      }
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
  template <int Threads>
  __device__ void fill(const DropoutStream& stream, int row, int key) {
    for (int i = threadIdx.x; i < Keys / 8 * Rows; i += Threads) {
      const int r = i % Rows, group = i / Rows;
      const DropoutNumbers numbers = stream.numbers(row + r, key / 8 + group);
      uint32_t byte = 0;
#pragma unroll
      for (int slot = 0; slot < 8; ++slot) {
        byte |= uint32_t{numbers.number(slot) < stream.threshold} << slot;
      }
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
