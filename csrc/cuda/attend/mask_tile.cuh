// attn_mask of a tile of scores in shared memory as it lies in global memory: in the dtype of the
// operands, or bool. It arrives asynchronously, and fragments in either orientation are read from
// it by ldmatrix.
//
// A matrix of ldmatrix has 16-bit words, two neighbours of which a lane gets, just as it has two
// neighbouring scores. So the bytes of a bool mask are interleaved first: a word holds keys 8
// apart, which lie in neighbouring blocks, or, where keys run along the fragment's rows, in the two
// halves of one.
#pragma once

#include "cuda/attend/mask_summary.cuh"
#include "cuda/attend/scores.cuh"
#include "cuda/numeric.cuh"
#include "cuda/ptx/opaque.cuh"

namespace flashattn::cuda {

template <class Element, int Rows, int Keys>
class MaskTile {
 public:
  // Called by all `Threads` of a block, for the tile from (row, key) on, of which `rows` and `keys`
  // exist: commit and wait. Rows of the mask consist of whole, aligned chunks.
  template <int Threads>
  __device__ __forceinline__ void load(const MaskTensor& mask, int batch, int head, int row,
                                       int key, int rows, int keys) {
    if (mask.dtype == DType::boolean) {
      load_as<Threads>(visible_, mask.view, batch, head, row, key, rows, keys);
    } else {
      load_as<Threads>(terms_, mask.view, batch, head, row, key, rows, keys);
    }
  }

  // Called after the wait by the threads that loaded; a barrier comes before `apply`.
  template <int Threads>
  __device__ __forceinline__ void interleave(const MaskTensor& mask) {
    if (mask.dtype != DType::boolean) return;
    visit_chunks<Threads>(visible_, [&](int row, int chunk) {
      uint4& bytes = *reinterpret_cast<uint4*>(visible_.chunk_at(row, chunk));
      bytes =
          make_uint4(__byte_perm(bytes.x, bytes.z, 0x5140), __byte_perm(bytes.x, bytes.z, 0x7362),
                     __byte_perm(bytes.y, bytes.w, 0x5140), __byte_perm(bytes.y, bytes.w, 0x7362));
    });
  }

  // From the dot products of a fragment to scores. `first` is the fragment's first row and key,
  // counted from the tile's; `summary` is of this tile.
  template <int Blocks, class Position>
  __device__ __forceinline__ void apply(float (&scores)[Blocks][4], const Position& first,
                                        float scale, DType dtype, uint32_t summary) const {
    static_assert(Blocks % 2 == 0);
    const bool some_hidden = summary & MaskSummary::kSomeHidden;
    // Rounded before a term is added, as GeneralScores does: layouts do not change results.
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[b][e] = __fmul_rn(scores[b][e], scale);
    }
    if (dtype == DType::boolean) {
      if (!some_hidden) return;
#pragma unroll
      for (int b = 0; b < Blocks; b += 2) {
        uint32_t words[2];
        load_visible(words, first, b);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int block = i / 4, e = i % 4;
          if (!is_visible(words, first, block, e)) scores[b + block][e] = kNegativeInfinity<float>;
        }
      }
    } else {
      visit_terms<Blocks>(first, [&](int b, int e, float term) { scores[b][e] += term; });
      if (!some_hidden) return;
      visit_terms<Blocks>(first, [&](int b, int e, float term) {
        if (term == kNegativeInfinity<float>) scores[b][e] = term;  // whatever the dot product is
      });
    }
  }

 private:
  // The chunks that a thread loads.
  template <int Threads, class Tile, class Visit>
  __device__ __forceinline__ static void visit_chunks(Tile&, const Visit& visit) {
    const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
#pragma unroll
    for (int i = 0; i < Rows * Tile::kChunksPerRow; i += Threads) {
      const int place = i + thread;
      if (Rows * Tile::kChunksPerRow % Threads != 0 && place >= Rows * Tile::kChunksPerRow) break;
      visit(place / Tile::kChunksPerRow, place % Tile::kChunksPerRow);
    }
  }

  template <int Threads, class Tile>
  __device__ __forceinline__ static void load_as(Tile& tile, const UntypedView4& mask, int batch,
                                                 int head, int row, int key, int rows, int keys) {
    const auto view = mask.as<const typename Tile::Element>();
    const int64_t row_stride = view.size[2] > 1 ? view.stride[2] : 0;
    const typename Tile::Element* const first =
        view.at(view.size[0] > 1 ? batch : 0, view.size[1] > 1 ? head : 0) + row * row_stride + key;
    visit_chunks<Threads>(tile, [&](int r, int chunk) {
      const bool valid = r < rows && chunk * Tile::kChunk < keys;
      ptx::cp_async_16(tile.address(r, chunk),
                       valid ? first + r * row_stride + chunk * Tile::kChunk : view.data, valid);
    });
  }

  __device__ __forceinline__ static int opaque_lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x) % 32);
  }

  // Two blocks of a fragment: of each, words [half], with elements 2 * half and 2 * half + 1.
  __device__ __forceinline__ void load_terms(uint32_t (&words)[4], const RowPosition& first,
                                             int block) const {
    const int lane = opaque_lane();
    ptx::ldmatrix_x4(
        words, terms_.place(first.row + lane % 16, first.key / 8 + lane / 16).after(0, block));
  }
  __device__ __forceinline__ void load_terms(uint32_t (&words)[4], const KeyPosition& first,
                                             int block) const {
    const int lane = opaque_lane();
    ptx::ldmatrix_x4_transposed(
        words, terms_.place(first.row + lane % 8 + lane / 16 * 8, first.key / 8 + lane / 8 % 2)
                   .after(8 * block, 0));
  }
  template <int Blocks, class Position, class Visit>
  __device__ __forceinline__ void visit_terms(const Position& first, const Visit& visit) const {
#pragma unroll
    for (int b = 0; b < Blocks; b += 2) {
      uint32_t words[4];
      load_terms(words, first, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(words[i], Element());
        visit(b + i / 2, i % 2 * 2, pair.x);
        visit(b + i / 2, i % 2 * 2 + 1, pair.y);
      }
    }
  }

  // Two blocks of a fragment: a word a half, or, where keys run along its rows, a word a block.
  __device__ __forceinline__ void load_visible(uint32_t (&words)[2], const RowPosition& first,
                                               int block) const {
    const int lane = opaque_lane();
    ptx::ldmatrix_x2(words,
                     visible_.place(first.row + lane % 16, first.key / 16).after(0, block / 2));
  }
  __device__ __forceinline__ void load_visible(uint32_t (&words)[2], const KeyPosition& first,
                                               int block) const {
    const int lane = opaque_lane();
    ptx::ldmatrix_x2_transposed(
        words, visible_.place(first.row + lane % 16, first.key / 16).after(8 * block, 0));
  }
  __device__ __forceinline__ static bool is_visible(const uint32_t (&words)[2], const RowPosition&,
                                                    int block, int e) {
    return words[e / 2] & 0xffu << 8 * (e % 2 * 2 + block);
  }
  __device__ __forceinline__ static bool is_visible(const uint32_t (&words)[2], const KeyPosition&,
                                                    int block, int e) {
    return words[block] & 0xffu << 8 * (e % 2 * 2 + e / 2);
  }

  union {
    SharedTile<Element, Rows, Keys> terms_;
    SharedTile<uint8_t, Rows, Keys> visible_;  // 0 or 1
  };
};

}  // namespace flashattn::cuda
