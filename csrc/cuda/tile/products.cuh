// Products of shared tiles, accumulated in registers, by warps that each own 16-row fragments.
//
// All arithmetic shares one fragment layout, that of m16n8: lane l holds, of every 8 columns,
// columns 2 (l % 4) and 2 (l % 4) + 1 of the rows l / 4 and l / 4 + 8. A fragment is [8-column
// block][4]. So masks, softmax and dropout are written once, for tensor cores and for plain
// multiply-adds. Transposed is the arithmetic that gives the same bits with left and right
// exchanged.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashattn::cuda {

template <class Real, int Fragments, int Blocks>
struct Accumulators {
  Real value[Fragments][Blocks][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int f = 0; f < Fragments; ++f) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[f][b][e] = Real(0);
      }
    }
  }
  __device__ __forceinline__ void add(const Accumulators& other) {
#pragma unroll
    for (int f = 0; f < Fragments; ++f) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[f][b][e] += other.value[f][b][e];
      }
    }
  }
  __device__ __forceinline__ void multiply(Real factor) {
#pragma unroll
    for (int f = 0; f < Fragments; ++f) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[f][b][e] *= factor;
      }
    }
  }
};

// Accumulators of a warp (rows, N) to a tile, columns from `column`: pair(a, b) is what two
// neighbours are stored as.
template <int F, int B, class Tile, class Pair>
__device__ __forceinline__ void store_pairs(const Accumulators<float, F, B>& from, Tile& tile,
                                            int row, int column, int lane, const Pair& pair) {
#pragma unroll
  for (int f = 0; f < F; ++f) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto stored = pair(from.value[f][b][2 * half], from.value[f][b][2 * half + 1]);
        using Stored = std::remove_const_t<decltype(stored)>;
        *reinterpret_cast<Stored*>(
            tile.at(row + 16 * f + 8 * half + lane / 4, column + 8 * b + 2 * (lane % 4))) = stored;
      }
    }
  }
}

// 16-bit elements on tensor cores, accumulated in fp32.
template <class Element_>
struct TensorCores {
  using Element = Element_;
  using Real = float;
  using Transposed = TensorCores;
  static constexpr int kDepth = 16;  // of one instruction

  // sum (warp rows, N) += a (rows from a_row, D) * b (N rows, D)^T.
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply_transposed(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_row,
                                                             const TileB& b, int b_row, int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
    const auto place_b = b.place(b_row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int d = 0; d < TileA::kColumns; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) ptx::ldmatrix_x4(fa[f], place_a.after(16 * f, d / 8));
#pragma unroll
      for (int n = 0; n < 8 * B; n += 16) {
        uint32_t fb[4];
        ptx::ldmatrix_x4(fb, place_b.after(n, d / 8));
        add<F, B>(sum, fa, fb, n / 8);
      }
    }
  }

  // sum (warp rows, N) += a (rows from a_row, D) * b (D rows, N columns from b_column).
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply(Accumulators<float, F, B>& sum, const TileA& a,
                                                  int a_row, const TileB& b, int b_column,
                                                  int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
    const auto place_b = b.place(lane % 16, b_column / 8 + lane / 16);
#pragma unroll
    for (int d = 0; d < TileA::kColumns; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) ptx::ldmatrix_x4(fa[f], place_a.after(16 * f, d / 8));
      add_rows<F, B>(sum, fa, place_b, d);
    }
  }

  // sum (warp rows, N) += a^T * b, a (D, columns from a_column), b (D, N columns from b_column).
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void transposed_multiply(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_column,
                                                             const TileB& b, int b_column,
                                                             int lane) {
    const auto place_a = a.place(lane % 8 + lane / 16 * 8, a_column / 8 + lane / 8 % 2);
    const auto place_b = b.place(lane % 16, b_column / 8 + lane / 16);
#pragma unroll
    for (int d = 0; d < TileA::kRows; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) ptx::ldmatrix_x4_transposed(fa[f], place_a.after(d, 2 * f));
      add_rows<F, B>(sum, fa, place_b, d);
    }
  }

  // sum (warp rows, N) += p * b, where p (warp rows, D) are accumulators, b (D rows, N columns):
  // two neighbouring accumulator blocks are one operand fragment.
  template <int F, int B, int Depth, class TileB, class Scratch>
  __device__ __forceinline__ static void multiply_accumulators(
      Accumulators<float, F, B>& sum, const Accumulators<float, F, Depth>& p, const TileB& b,
      Scratch&, int lane) {
    const auto place_b = b.place(lane % 16, lane / 16);
#pragma unroll
    for (int d = 0; d < 8 * Depth; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&block)[4] = p.value[f][d / 8 + half];
          fa[f][2 * half] = ptx::pack<Element>(block[0], block[1]);
          fa[f][2 * half + 1] = ptx::pack<Element>(block[2], block[3]);
        }
      }
      add_rows<F, B>(sum, fa, place_b, d);
    }
  }

  // Rounds accumulators (warp rows, N) to a tile, columns from `column`.
  template <int F, int B, class Tile>
  __device__ __forceinline__ static void store(const Accumulators<float, F, B>& from, Tile& tile,
                                               int row, int column, int lane) {
    store_pairs(from, tile, row, column, lane,
                [](float a, float b) { return ptx::pack<Element>(a, b); });
  }

  struct NoScratch {};
  template <int Rows, int Columns>
  using Scratch = NoScratch;

 private:
  template <int F, int B, class Place>
  __device__ __forceinline__ static void add_rows(Accumulators<float, F, B>& sum,
                                                  const uint32_t (&fa)[F][4], const Place& b,
                                                  int row) {
#pragma unroll
    for (int n = 0; n < 8 * B; n += 16) {
      uint32_t fb[4];
      ptx::ldmatrix_x4_transposed(fb, b.after(row, n / 8));
      add<F, B>(sum, fa, fb, n / 8);
    }
  }

  template <int F, int B>
  __device__ __forceinline__ static void add(Accumulators<float, F, B>& sum,
                                             const uint32_t (&fa)[F][4], const uint32_t (&fb)[4],
                                             int block) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
      ptx::mma_m16n8k16<Element>(sum.value[f][block], fa[f], fb[0], fb[1]);
      ptx::mma_m16n8k16<Element>(sum.value[f][block + 1], fa[f], fb[2], fb[3]);
    }
  }
};

// fp32 and fp64 by fused multiply-adds: the precision of the dtype, on every GPU.
template <class Real_>
struct MultiplyAdds {
  using Element = Real_;
  using Real = Real_;
  using Transposed = MultiplyAdds;
  static constexpr int kStep = 16 / sizeof(Real);  // elements of a 16-byte access

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply_transposed(Accumulators<Real, F, B>& sum,
                                                             const TileA& a, int a_row,
                                                             const TileB& b, int b_row, int lane) {
    const int row = a_row + lane / 4, column = b_row + 2 * (lane % 4);
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kStep) {
      Real va[F][2][kStep];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load(va[f][half], a, row + 16 * f + 8 * half, d);
      }
#pragma unroll
      for (int block = 0; block < B; ++block) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Real vb[kStep];
          load(vb, b, column + 8 * block + e, d);
#pragma unroll
          for (int f = 0; f < F; ++f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int k = 0; k < kStep; ++k) {
                sum.value[f][block][2 * half + e] += va[f][half][k] * vb[k];
              }
            }
          }
        }
      }
    }
  }

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply(Accumulators<Real, F, B>& sum, const TileA& a,
                                                  int a_row, const TileB& b, int b_column,
                                                  int lane) {
    const int row = a_row + lane / 4;
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kStep) {
      Real va[F][2][kStep];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load(va[f][half], a, row + 16 * f + 8 * half, d);
      }
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        add_row<F, B>(sum, b, d + k, b_column, lane,
                      [&](int f, int half) { return va[f][half][k]; });
      }
    }
  }

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void transposed_multiply(Accumulators<Real, F, B>& sum,
                                                             const TileA& a, int a_column,
                                                             const TileB& b, int b_column,
                                                             int lane) {
#pragma unroll 2
    for (int d = 0; d < TileA::kRows; ++d) {
      Real va[F][2];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          va[f][half] = *a.at(d, a_column + 16 * f + 8 * half + lane / 4);
        }
      }
      add_row<F, B>(sum, b, d, b_column, lane, [&](int f, int half) { return va[f][half]; });
    }
  }

  // Through shared memory, where each warp has its own rows.
  template <int F, int B, int Depth, class TileB, class Scratch>
  __device__ __forceinline__ static void multiply_accumulators(
      Accumulators<Real, F, B>& sum, const Accumulators<Real, F, Depth>& p, const TileB& b,
      Scratch& scratch, int lane) {
    const int row = threadIdx.x / 32 * 16 * F;
    __syncwarp();
    store(p, scratch, row, 0, lane);
    __syncwarp();
    multiply(sum, scratch, row, b, 0, lane);
  }

  template <int F, int B, class Tile>
  __device__ __forceinline__ static void store(const Accumulators<Real, F, B>& from, Tile& tile,
                                               int row, int column, int lane) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          *tile.at(row + 16 * f + 8 * (e / 2) + lane / 4, column + 8 * b + 2 * (lane % 4) + e % 2) =
              from.value[f][b][e];
        }
      }
    }
  }

  template <int Rows, int Columns>
  using Scratch = SharedTile<Real, Rows, Columns>;

 private:
  template <class Tile>
  __device__ __forceinline__ static void load(Real (&to)[kStep], const Tile& tile, int row,
                                              int column) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile.at(row, column));
  }

  template <int F, int B, class TileB, class ValueOfA>
  __device__ __forceinline__ static void add_row(Accumulators<Real, F, B>& sum, const TileB& b,
                                                 int row, int column, int lane, const ValueOfA& a) {
#pragma unroll
    for (int block = 0; block < B; ++block) {
      const Real* pair = b.at(row, column + 8 * block + 2 * (lane % 4));
      const Real vb[2] = {pair[0], pair[1]};
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.value[f][block][e] += a(f, e / 2) * vb[e % 2];
      }
    }
  }
};

}  // namespace flashattn::cuda
