// fp32 products on tensor cores, as exact as fp32 multiply-adds: each number is the sum of two of
// 11 bits (TF32), and three of the four products of such sums are made (Ootomo and Yokota,
// arXiv:2203.03341). The fourth is below the rounding of fp32.
//
// Tensor cores truncate every sum, so they sum up a short depth only, small products first; what
// they give is added up rounded to nearest. An infinity comes out as NaN; parts below the normal
// numbers count as 0.
#pragma once

#include <cstdint>

#include "cuda/ptx/load.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda {

// Which operand's small parts are multiplied first.
enum class Side { left, right };

template <Side first>
struct SplitTensorCores {
  using Element = float;
  using Real = float;
  // Left and right exchanged, with the same bits as results: backward makes scores transposed.
  using Transposed = SplitTensorCores<first == Side::left ? Side::right : Side::left>;
  static constexpr int kDepth = 8;  // of one instruction
  // Instructions that sum up without rounding to nearest; more where their operands have room.
  static constexpr int kSteps = 2, kMoreSteps = 4;

  // sum (warp rows, N) += a (rows from a_row, D) * b (N rows, D)^T.
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply_transposed(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_row,
                                                             const TileB& b, int b_row, int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
    const auto place_b = b.place(b_row + lane % 8, lane / 8);
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kSteps * kDepth) {
      Split<4> fa[kSteps][F];
      load_rows(fa, place_a, d);
      add(sum, fa, [&](int block, Split<2>(&fb)[kSteps]) {
        static_assert(kSteps == 2);  // 16 columns are one ldmatrix
        uint32_t words[4];
        ptx::ldmatrix_x4(words, place_b.after(8 * block, d / 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) fb[i / 2].set(i % 2, words[i]);
      });
    }
  }

  // sum (warp rows, N) += a (rows from a_row, D) * b (D rows, N columns from b_column).
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply(Accumulators<float, F, B>& sum, const TileA& a,
                                                  int a_row, const TileB& b, int b_column,
                                                  int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
    const Column<TileB> columns(b, lane % 4, 4, b_column, lane);
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kMoreSteps * kDepth) {
      Split<4> fa[kMoreSteps][F];
      load_rows(fa, place_a, d);
      add(sum, fa, [&](int block, Split<2>(&fb)[kMoreSteps]) { columns.load(fb, d, block); });
    }
  }

  // sum (warp rows, N) += a^T * b, a (D, columns from a_column), b (D, N columns from b_column).
  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void transposed_multiply(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_column,
                                                             const TileB& b, int b_column,
                                                             int lane) {
    const Column<TileA> columns_a(a, 2 * (lane % 4), 1, a_column, lane);
    const Column<TileB> columns_b(b, 2 * (lane % 4), 1, b_column, lane);
#pragma unroll 1
    for (int d = 0; d < TileA::kRows; d += kMoreSteps * kDepth) {
      Split<4> fa[kMoreSteps][F];
#pragma unroll
      for (int s = 0; s < kMoreSteps; ++s) {
#pragma unroll
        for (int f = 0; f < F; ++f) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            fa[s][f].set(i, columns_a.word(i / 2, d + kDepth * s, 2 * f + i % 2));
          }
        }
      }
      add(sum, fa, [&](int block, Split<2>(&fb)[kMoreSteps]) { columns_b.load(fb, d, block); });
    }
  }

  // sum (warp rows, N) += p * b, where p (warp rows, D) are accumulators, b (D rows, N columns). A
  // lane holds neighbouring columns of p, not columns 4 apart: rows of b are taken in that order.
  template <int F, int B, int Depth, class TileB, class Scratch>
  __device__ __forceinline__ static void multiply_accumulators(
      Accumulators<float, F, B>& sum, const Accumulators<float, F, Depth>& p, const TileB& b,
      Scratch&, int lane) {
    const Column<TileB> columns(b, 2 * (lane % 4), 1, 0, lane);
#pragma unroll
    for (int block = 0; block < Depth; block += kSteps) {
      Split<4> fa[kSteps][F];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int f = 0; f < F; ++f) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            fa[s][f].set(i, __float_as_uint(p.value[f][block + s][i % 2 * 2 + i / 2]));
          }
        }
      }
      add(sum, fa, [&](int n, Split<2>(&fb)[kSteps]) { columns.load(fb, kDepth * block, n); });
    }
  }

  template <int F, int B, class Tile>
  __device__ __forceinline__ static void store(const Accumulators<float, F, B>& from, Tile& tile,
                                               int row, int column, int lane) {
    store_pairs(from, tile, row, column, lane, [](float a, float b) { return make_float2(a, b); });
  }

  struct NoScratch {};
  template <int Rows, int Columns>
  using Scratch = NoScratch;

 private:
  // An operand fragment in two parts.
  template <int Count>
  struct Split {
    uint32_t high[Count], low[Count];

    __device__ __forceinline__ void set(int i, uint32_t word) {
      high[i] = ptx::to_tf32(__uint_as_float(word));
      // Exact; tensor cores leave out the bits beyond TF32.
      low[i] = __float_as_uint(__uint_as_float(word) - __uint_as_float(high[i]));
    }
  };

  // A lane's column of every eight of a tile, in rows `row` and `row + next` of every eight.
  template <class Tile>
  struct Column {
    typename Tile::Place place[2];

    __device__ __forceinline__ Column(const Tile& tile, int row, int next, int column, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        place[i] = tile.place(row + i * next, column / 4 + lane / 16);
        place[i].row += lane / 4 % 4 * 4;
      }
    }
    // `row` is a multiple of 8.
    __device__ __forceinline__ uint32_t word(int i, int row, int block) const {
      return ptx::load_shared(place[i].after(row, 2 * block));
    }
    // Right operands of eight columns, of the depth from d on.
    template <int Steps>
    __device__ __forceinline__ void load(Split<2> (&fb)[Steps], int d, int block) const {
#pragma unroll
      for (int s = 0; s < Steps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) fb[s].set(i, word(i, d + kDepth * s, block));
      }
    }
  };

  template <int Steps, int F, class Place>
  __device__ __forceinline__ static void load_rows(Split<4> (&fa)[Steps][F], const Place& a,
                                                   int d) {
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
#pragma unroll
      for (int f = 0; f < F; ++f) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, a.after(16 * f, d / 4 + 2 * s));
#pragma unroll
        for (int i = 0; i < 4; ++i) fa[s][f].set(i, words[i]);
      }
    }
  }

  // `load(block, fragments)` gives the right operands of eight columns.
  template <int Steps, int F, int B, class Load>
  __device__ __forceinline__ static void add(Accumulators<float, F, B>& sum,
                                             const Split<4> (&a)[Steps][F], const Load& load) {
#pragma unroll
    for (int block = 0; block < B; ++block) {
      Split<2> b[Steps];
      load(block, b);
#pragma unroll
      for (int f = 0; f < F; ++f) {
        float part[4] = {};
#pragma unroll
        for (int s = 0; s < Steps; ++s) {
          if constexpr (first == Side::left) {
            ptx::mma_m16n8k8_tf32(part, a[s][f].low, b[s].high, part);
            ptx::mma_m16n8k8_tf32(part, a[s][f].high, b[s].low, part);
          } else {
            ptx::mma_m16n8k8_tf32(part, a[s][f].high, b[s].low, part);
            ptx::mma_m16n8k8_tf32(part, a[s][f].low, b[s].high, part);
          }
        }
#pragma unroll
        for (int s = 0; s < Steps; ++s) {
          ptx::mma_m16n8k8_tf32(part, a[s][f].high, b[s].high, part);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.value[f][block][e] += part[e];
      }
    }
  }
};

}  // namespace flashattn::cuda
