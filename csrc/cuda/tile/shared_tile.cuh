// A matrix tile in shared memory.
//
// Rows are cut into 16-byte chunks; a chunk's place is its index exclusive-or a function of the
// row, chosen so that eight neighbouring rows fall into different banks whatever the row pitch.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"

namespace flashattn::cuda {

template <class Element_, int Rows, int Columns>
struct SharedTile {
  using Element = Element_;
  static constexpr int kRows = Rows, kColumns = Columns;
  static constexpr int kChunk = 16 / sizeof(Element);  // elements
  static constexpr int kChunksPerRow = Columns / kChunk;
  static_assert(Columns % (2 * kChunk) == 0 && Rows % 8 == 0);

  alignas(128) Element data[Rows * Columns];

  // The largest power of two, up to 8, that divides the pitch in chunks decides how many rows share
  // a bank: so many values the exclusive-or needs.
  static constexpr int kPhases = kChunksPerRow % 8 == 0 ? 8 : kChunksPerRow % 4 == 0 ? 4 : 2;

  // What a row's chunks are exclusive-ored with. For 32-bit elements, reading pieces of a column:
  // rows 0 to 3 or 4 to 7 differ in more than the lowest bit, and so do the even and the odd rows.
  __device__ __forceinline__ static int phase(int row) {
    const int r = row / (8 / kPhases) % kPhases;
    if constexpr (sizeof(Element) == 4 && kPhases == 8) return (r ^ r / 4) % 4 * 2 + r / 4;
    return r;
  }

  __device__ __forceinline__ static int chunk_index(int row, int chunk) {
    return row * kChunksPerRow + (chunk ^ phase(row));
  }
  __device__ __forceinline__ uint32_t address(int row, int chunk) const {
    return ptx::shared_address(data) + 16 * chunk_index(row, chunk);
  }

  // A lane's place in the tile, from which constant steps away are cheap: a step of rows is a
  // multiple of 8 and a step of chunks meets no carry (the place's chunk is below the step's
  // lowest bit, or above its highest), so that it commutes with the exclusive-or.
  struct Place {
    uint32_t row;    // address of the row's first chunk
    uint32_t chunk;  // bytes into the row
    __device__ __forceinline__ uint32_t after(int rows, int chunks) const {
      return row + (chunk ^ (16 * chunks)) + rows * kChunksPerRow * 16;
    }
  };
  __device__ __forceinline__ Place place(int row, int chunk) const {
    const int first = chunk_index(row, 0) / kChunksPerRow * kChunksPerRow;
    return {ptx::shared_address(data) + 16 * first,
            static_cast<uint32_t>(16 * (chunk_index(row, chunk) - first))};
  }
  __device__ __forceinline__ Element* chunk_at(int row, int chunk) {
    return data + kChunk * chunk_index(row, chunk);
  }
  // `count` neighbouring elements that start here are together when they lie in one chunk.
  __device__ __forceinline__ const Element* at(int row, int column) const {
    return data + kChunk * chunk_index(row, column / kChunk) + column % kChunk;
  }
  __device__ __forceinline__ Element* at(int row, int column) {
    return const_cast<Element*>(static_cast<const SharedTile*>(this)->at(row, column));
  }
};

}  // namespace flashattn::cuda
