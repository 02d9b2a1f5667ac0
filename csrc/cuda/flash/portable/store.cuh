// Accumulators -> global memory, through shared memory, so that whole pieces of rows are written.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/attend/scores.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda::portable {

// Where a tile of rows goes: its first element, and how much of it exists.
template <class Element>
struct RowsOut {
  Element* data;
  int64_t row_stride, column_stride;
  int rows, columns;
  bool chunked;  // rows consist of whole, aligned 16-byte chunks
};

// Stores a warp's rows [warp_row, warp_row + 16 F) of the tile, by way of the same rows of
// `staging` from `column` on, which nobody else needs any more.
template <class Arithmetic, int F, int Blocks, class Tile>
__device__ __forceinline__ void store_rows(
    const Accumulators<typename Arithmetic::Real, F, Blocks>& from, Tile& staging, int warp_row,
    int column, const RowsOut<typename Arithmetic::Element>& to, int lane) {
  constexpr int kColumns = 8 * Blocks, kChunk = Tile::kChunk, kChunks = kColumns / kChunk;
  static_assert(kColumns <= Tile::kColumns);
  __syncwarp();
  Arithmetic::store(from, staging, warp_row, column, lane);
  __syncwarp();
  if (to.chunked) {
#pragma unroll 2
    for (int i = lane; i < 16 * F * kChunks; i += 32) {
      const int row = warp_row + i / kChunks, chunk = i % kChunks;
      if (row < to.rows && chunk * kChunk < to.columns) {
        *reinterpret_cast<uint4*>(to.data + row * to.row_stride + chunk * kChunk) =
            *reinterpret_cast<const uint4*>(staging.chunk_at(row, column / kChunk + chunk));
      }
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < 16 * F * kColumns; i += 32) {
      const int row = warp_row + i / kColumns, c = i % kColumns;
      if (row < to.rows && c < to.columns) {
        to.data[row * to.row_stride + c * to.column_stride] = *staging.at(row, column + c);
      }
    }
  }
}

// A warp's score gradients, keys along the fragments' rows, to the gradient of an attn_mask that
// has all rows and keys. It is zero where nobody writes.
template <class Real, int F, int Blocks>
__device__ __forceinline__ void write_mask_gradient(const BackwardArguments& a, int batch, int head,
                                                    const KeyPosition& at, int len_q, int len_k,
                                                    const Accumulators<Real, F, Blocks>& grads) {
  const auto to = a.outputs.grad_mask.as<Real>();
  Real* const first = to.at(to.size[0] > 1 ? batch : 0, to.size[1] > 1 ? head : 0, at.row, at.key);
  const bool add = a.mask_gradient == MaskGradient::added;
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (at.row_of(b, e) >= len_q) continue;
      Real* const row = first + (8 * b + e) * to.stride[2];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = 16 * f + 8 * half;
          if (at.key + key >= len_k) continue;
          const Real grad = grads.value[f][b][2 * half + e];
          if (add) {
            atomicAdd(row + key, grad);
          } else {
            row[key] = grad;
          }
        }
      }
    }
  }
}

}  // namespace flashattn::cuda::portable
