// attn_mask -> the shared tile that GeneralScores reads.
#pragma once

#include "cuda/attend/scores.cuh"

namespace flashattn::cuda {

// A mask of one (batch, head), read in place.
struct BiasSource {
  const void* data;
  int64_t offset, row_stride, key_stride;
  DType dtype;
  int rows, keys;  // beyond them nothing is read
  bool chunked;    // eight neighbouring keys, from a multiple of eight on, are one aligned piece

  __device__ BiasSource(const MaskTensor& mask, bool chunked, int batch, int head, int rows,
                        int keys)
      : data(mask.view.data), dtype(mask.dtype), rows(rows), keys(keys), chunked(chunked) {
    const UntypedView4& view = mask.view;
    offset = (view.size[0] > 1 ? batch * view.stride[0] : 0) +
             (view.size[1] > 1 ? head * view.stride[1] : 0);
    row_stride = view.size[2] > 1 ? view.stride[2] : 0;
    key_stride = view.size[3] > 1 ? view.stride[3] : 0;
  }
};

template <class Real>
__device__ __forceinline__ Real bias_term(bool visible) {
  return visible ? Real(0) : kNegativeInfinity<Real>;
}
template <class Real, class Element>
__device__ __forceinline__ Real bias_term(Element element) {
  return convert<Real>(element);
}

// Called by all `Threads` of a block, then a barrier.
template <int Threads, class Element, class Real, int Rows, int Keys>
__device__ void fill_bias_typed(SharedTile<Real, Rows, Keys>& tile, int first_row, int first_key,
                                const BiasSource& from) {
  constexpr int kPiece = 8;
  struct alignas(kPiece * sizeof(Element) < 16 ? kPiece * sizeof(Element) : 16) Piece {
    Element element[kPiece];
  };
#pragma unroll 2
  for (int i = threadIdx.x; i < Rows * Keys / kPiece; i += Threads) {
    const int r = i / (Keys / kPiece), k = i % (Keys / kPiece) * kPiece;
    const int row = first_row + r, key = first_key + k;
    const Element* source = static_cast<const Element*>(from.data) + from.offset +
                            row * from.row_stride + key * from.key_stride;
    Real term[kPiece];
    if (from.chunked && row < from.rows && key + kPiece <= from.keys) {
      const Piece piece = *reinterpret_cast<const Piece*>(source);
#pragma unroll
      for (int e = 0; e < kPiece; ++e) term[e] = bias_term<Real>(piece.element[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        term[e] = row < from.rows && key + e < from.keys
                      ? bias_term<Real>(source[e * from.key_stride])
                      : kNegativeInfinity<Real>;
      }
    }
    constexpr int kChunk = SharedTile<Real, Rows, Keys>::kChunk;
    struct alignas(16) Chunk {
      Real value[kChunk];
    };
#pragma unroll
    for (int c = 0; c < kPiece / kChunk; ++c) {
      Chunk chunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) chunk.value[e] = term[c * kChunk + e];
      *reinterpret_cast<Chunk*>(tile.chunk_at(r, k / kChunk + c)) = chunk;
    }
  }
}

template <int Threads, class Real, int Rows, int Keys>
__device__ __forceinline__ void fill_bias(SharedTile<Real, Rows, Keys>& tile, int row, int key,
                                          const BiasSource& from) {
  switch (from.dtype) {
    case DType::boolean: return fill_bias_typed<Threads, bool>(tile, row, key, from);
    case DType::float16: return fill_bias_typed<Threads, float16>(tile, row, key, from);
    case DType::bfloat16: return fill_bias_typed<Threads, bfloat16>(tile, row, key, from);
    case DType::float32: return fill_bias_typed<Threads, float>(tile, row, key, from);
    case DType::float64: return fill_bias_typed<Threads, double>(tile, row, key, from);
  }
}

}  // namespace flashattn::cuda
