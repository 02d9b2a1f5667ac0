// Global memory -> shared tile. Rows and columns outside the matrix become zeros, so that no
// product ever meets what lies beyond a sequence.
#pragma once

#include <cstdint>

#include "core/dtype.h"
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
  constexpr int kChunks = Rows * Tile::kChunksPerRow;
#pragma unroll
  for (int first = 0; first < kChunks; first += Threads) {
    const int index = first + threadIdx.x;
    if (kChunks % Threads != 0 && index >= kChunks) break;
    const int row = index / Tile::kChunksPerRow, chunk = index % Tile::kChunksPerRow;
    const int column = chunk * Tile::kChunk;
    const bool valid = row < from.rows && column < from.columns;
    if (from.chunked) {
      const Element* source = valid ? from.data + row * from.row_stride + column : from.data;
      ptx::cp_async_16(tile.address(row, chunk), source, valid);
    } else {
      Element* to = tile.chunk_at(row, chunk);
#pragma unroll
      for (int e = 0; e < Tile::kChunk; ++e) {
        const bool inside = row < from.rows && column + e < from.columns;
        to[e] = inside ? from.data[row * from.row_stride + (column + e) * from.column_stride]
                       : convert<Element>(0.0f);
      }
    }
  }
}

}  // namespace flashattn::cuda
