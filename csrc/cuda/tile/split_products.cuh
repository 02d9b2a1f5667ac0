// fp32 products on tensor cores: each number is the sum of two of 11 bits (TF32), and three of the
// four products of such sums are made (Ootomo and Yokota, arXiv:2203.03341). What is left out is
// below the rounding of fp32.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda {

struct SplitTensorCores {
  using Element = float;
  using Real = float;
  static constexpr int kDepth = 8;  // of one instruction

  // An operand fragment in two parts. An infinity is left out of the products with small parts,
  // where 0 times infinity would make NaN of it.
  template <int Count>
  struct Split {
    uint32_t large[Count], small[Count], finite[Count];

    __device__ __forceinline__ void set(const uint32_t (&word)[Count]) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const float value = __uint_as_float(word[i]);
        large[i] = ptx::to_tf32(value);
        if (large[i] << 1 == 0xff000000u) large[i] = word[i] & 0xffffe000u;  // not up to infinity
        const float rest = value - __uint_as_float(large[i]);
        const bool is_finite = fabsf(value) < INFINITY;
        small[i] = is_finite ? ptx::to_tf32(rest) : 0u;
        finite[i] = is_finite ? large[i] : 0u;
      }
    }
  };

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply_transposed(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_row,
                                                             const TileB& b, int b_row, int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
    const auto place_b = b.place(b_row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) ptx::ldmatrix_x4(fa[f], place_a.after(16 * f, d / 4));
      add<F, B>(sum, fa, [&](int block, uint32_t (&fb)[2][2]) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words, place_b.after(8 * block, d / 4));
        fb[0][0] = words[0], fb[0][1] = words[1], fb[1][0] = words[2], fb[1][1] = words[3];
      });
    }
  }

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void multiply(Accumulators<float, F, B>& sum, const TileA& a,
                                                  int a_row, const TileB& b, int b_column,
                                                  int lane) {
    const auto place_a = a.place(a_row + lane % 16, lane / 16);
#pragma unroll 1
    for (int d = 0; d < TileA::kColumns; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) ptx::ldmatrix_x4(fa[f], place_a.after(16 * f, d / 4));
      add_rows<F, B>(sum, fa, b, d + lane % 4, 4, b_column + lane / 4);
    }
  }

  template <int F, int B, class TileA, class TileB>
  __device__ __forceinline__ static void transposed_multiply(Accumulators<float, F, B>& sum,
                                                             const TileA& a, int a_column,
                                                             const TileB& b, int b_column,
                                                             int lane) {
#pragma unroll 1
    for (int d = 0; d < TileA::kRows; d += kDepth) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          fa[f][i] = __float_as_uint(
              *a.at(d + lane % 4 + i / 2 * 4, a_column + 16 * f + i % 2 * 8 + lane / 4));
        }
      }
      add_rows<F, B>(sum, fa, b, d + lane % 4, 4, b_column + lane / 4);
    }
  }

  // A lane holds neighbouring columns of p, not columns 4 apart: the rows of b are taken in the
  // same order.
  template <int F, int B, int Depth, class TileB, class Scratch>
  __device__ __forceinline__ static void multiply_accumulators(
      Accumulators<float, F, B>& sum, const Accumulators<float, F, Depth>& p, const TileB& b,
      Scratch&, int lane) {
#pragma unroll
    for (int block = 0; block < Depth; ++block) {
      uint32_t fa[F][4];
#pragma unroll
      for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          fa[f][i] = __float_as_uint(p.value[f][block][i % 2 * 2 + i / 2]);
        }
      }
      add_rows<F, B>(sum, fa, b, 8 * block + 2 * (lane % 4), 1, lane / 4);
    }
  }

  template <int F, int B, class Tile>
  __device__ __forceinline__ static void store(const Accumulators<float, F, B>& from, Tile& tile,
                                               int row, int column, int lane) {
    MultiplyAdds<float>::store(from, tile, row, column, lane);
  }

  struct NoScratch {};
  template <int Rows, int Columns>
  using Scratch = NoScratch;

 private:
  // b in rows `row` and `row + next`, one column a lane of every eight.
  template <int F, int B, class TileB>
  __device__ __forceinline__ static void add_rows(Accumulators<float, F, B>& sum,
                                                  const uint32_t (&fa)[F][4], const TileB& b,
                                                  int row, int next, int column) {
    add<F, B>(sum, fa, [&](int block, uint32_t (&fb)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fb[i / 2][i % 2] = __float_as_uint(*b.at(row + i % 2 * next, column + 8 * (block + i / 2)));
      }
    });
  }

  // `load(block, fragments)` gives the operands of two blocks of eight columns.
  template <int F, int B, class Load>
  __device__ __forceinline__ static void add(Accumulators<float, F, B>& sum,
                                             const uint32_t (&fa)[F][4], const Load& load) {
    static_assert(B % 2 == 0);
    Split<4> a[F];
#pragma unroll
    for (int f = 0; f < F; ++f) a[f].set(fa[f]);
#pragma unroll
    for (int block = 0; block < B; block += 2) {
      uint32_t fb[2][2];
      load(block, fb);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Split<2> b;
        b.set(fb[i]);
#pragma unroll
        for (int f = 0; f < F; ++f) {
          float (&to)[4] = sum.value[f][block + i];
          ptx::mma_m16n8k8_tf32(to, a[f].small, b.finite);
          ptx::mma_m16n8k8_tf32(to, a[f].finite, b.small);
          ptx::mma_m16n8k8_tf32(to, a[f].large, b.large);
        }
      }
    }
  }
};

}  // namespace flashattn::cuda
