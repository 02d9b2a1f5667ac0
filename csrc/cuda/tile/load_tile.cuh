// Global memory -> shared tile. Rows and columns outside the matrix become zeros, so that no
// product ever meets what lies beyond a sequence.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/ptx/opaque.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashattn::cuda {

// A strided matrix in global memory.
template <class Element>
struct GlobalMatrix {
  const Element* data;
  int64_t row_stride, column_stride;
  int rows, columns;  // what exists; the tile may be larger
  bool chunked;       // rows consist of whole, aligned 16-byte chunks
};

// Called by all `Threads` of a block. Chunked rows arrive asynchronously: commit and wait. The rest
// is stored at once.
template <int Threads, class Element, int Rows, int Columns>
__device__ __forceinline__ void load_tile(SharedTile<Element, Rows, Columns>& tile,
                                          const GlobalMatrix<Element>& from) {
  using Tile = SharedTile<Element, Rows, Columns>;
  if (from.chunked) {
    // A thread stays in its columns of chunks. Steps are powers of two.
    constexpr int kShare = Tile::kChunksPerRow & -Tile::kChunksPerRow;
    constexpr int kColumnStep = kShare < 16 ? kShare : 16;
    constexpr int kRowStep = Threads / kColumnStep;
    // Computed again by every call: cheaper than registers that are held across a loop.
    const uint32_t thread = ptx::opaque(threadIdx.x);
    const int first_row = static_cast<int>(thread / kColumnStep);
#pragma unroll
    for (int c = 0; c < Tile::kChunksPerRow; c += kColumnStep) {
      const int chunk = c + static_cast<int>(thread % kColumnStep);
      const int rows = chunk * Tile::kChunk < from.columns ? from.rows - first_row : 0;
      const Element* source = from.data + first_row * from.row_stride + chunk * Tile::kChunk;
      const int64_t step = kRowStep * from.row_stride;
#pragma unroll
      for (int i = 0; i < (Rows + kRowStep - 1) / kRowStep; ++i) {
        const int row = first_row + i * kRowStep;
        if (Rows % kRowStep != 0 && row >= Rows) break;
        // A row's place in its eight is the same every 8 rows: only a constant away.
        const uint32_t address = kRowStep % 8 == 0 ? tile.address(first_row, chunk) +
                                                         i * kRowStep * Tile::kChunksPerRow * 16
                                                   : tile.address(row, chunk);
        ptx::cp_async_16(address, source, i * kRowStep < rows);
        source += step;
      }
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < Rows * Columns; i += Threads) {
      const int row = i / Columns, column = i % Columns;
      *tile.at(row, column) = row < from.rows && column < from.columns
                                  ? from.data[row * from.row_stride + column * from.column_stride]
                                  : convert<Element>(0.0f);
    }
  }
}

}  // namespace flashattn::cuda
