// What the backward kernels share: their tiles, and the step from scores to their gradients.
//
// Products are made transposed, keys along the fragments' rows: the probabilities and the score
// gradients of a warp are then the left operands of grad_value and grad_key as they come.
#pragma once

#include "cuda/attend/bias.cuh"
#include "cuda/attend/dropout.cuh"
#include "cuda/attend/mask_tile.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/tile/load_tile.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda::portable {

// A block owns Keys keys and streams Rows query rows at a time. KeyWarps share the keys,
// ColumnWarps the query rows of scores and the columns of gradients; QueryWarps the rows of
// grad_query.
//
// HeadDim covers head_dim and head_dim_v. Where the operand tiles of that width do not fit into
// shared memory, products run over Depth columns at a time, and a block makes Slice columns of the
// gradients.
template <class Arithmetic_, int HeadDim, int Depth, int Slice, int Keys, int Rows, int KeyWarps,
          int ColumnWarps, int QueryWarps, int Stages, int Blocks>
struct BackwardTile {
  using Arithmetic = typename Arithmetic_::Transposed;  // of forward's
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  static constexpr int kHeadDim = HeadDim, kDepth = Depth, kSlice = Slice;
  static constexpr int kKeys = Keys, kRows = Rows;
  static constexpr int kKeyWarps = KeyWarps, kColumnWarps = ColumnWarps;
  static constexpr int kQueryWarps = QueryWarps;
  static constexpr int kStages = Stages;
  static constexpr int kWarps = KeyWarps * ColumnWarps, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerMultiprocessor = Blocks;
  static constexpr bool kWhole = Depth == HeadDim && Slice == HeadDim;
  // Of a warp, in scores: 16-key fragments, and query rows.
  static constexpr int kFragments = Keys / (16 * KeyWarps);
  static constexpr int kWarpRows = Rows / ColumnWarps;
  static_assert(kWhole || Stages == 1);
  static_assert(kPaddedRows % Rows == 0);
};

template <class Tile, class Terms>
struct BackwardShared {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Tile::Element;
  using Real = typename Tile::Real;
  using Pairs = SharedTile<Element, Tile::kKeys, Tile::kRows>;
  // Key and value; query and grad_out.
  SharedTile<Element, Tile::kKeys, Tile::kDepth> own[2];
  SharedTile<Element, Tile::kRows, Tile::kDepth> stream[Tile::kStages][2];
  // Columns of key, query and grad_out that are multiplied with, where not whole.
  template <int Rows>
  using Slice = std::conditional_t<Tile::kWhole, NoTile, SharedTile<Element, Rows, Tile::kSlice>>;
  Slice<Tile::kKeys> own_slice;
  Slice<Tile::kRows> stream_slice[2];
  Pairs score_gradients;
  std::conditional_t<(Tile::kColumnWarps > 1), Pairs,
                     typename Arithmetic::template Scratch<Tile::kKeys, Tile::kRows>>
      probabilities;
  struct alignas(16) RowTerms {
    Real lse_high[Tile::kRows], lse_low[Tile::kRows], deltas[Tile::kRows];
  } row_terms[Tile::kStages];
  typename Terms::template Bias<Tile::kRows, Tile::kKeys> bias[Terms::kMasked ? Tile::kStages : 1];
  // Of the rows now and those after them.
  std::conditional_t<Terms::kDropout, DropoutTile<Tile::kRows, Tile::kKeys>, NoTile> dropout[2];
  TileMask mask;  // seldom needed: not worth registers
};

// A matrix of one head: `rows` rows from `first` on, columns from `column` on.
template <class Element>
__device__ __forceinline__ GlobalMatrix<Element> head_matrix(const UntypedView4& view, int batch,
                                                             int head, int64_t first, int rows,
                                                             int column, bool chunked) {
  const auto typed = view.as<const Element>();
  return {typed.at(batch, head, first, column),    view.stride[2], view.stride[3], rows,
          static_cast<int>(view.size[3]) - column, chunked};
}

// sum = own * stream^T over the whole head dim. `own` and `stream` give the matrix from a column
// on. When everything is resident the tiles hold it already.
template <class Tile, class Shared, class Sum, class Own, class Stream>
__device__ __forceinline__ void product(Sum& sum, Shared& shared, int stage, int side, int columns,
                                        const Own& own, const Stream& stream, int key, int row,
                                        int lane) {
  using Arithmetic = typename Tile::Arithmetic;
  sum.clear();
  if constexpr (Tile::kWhole) {
    Arithmetic::multiply_transposed(sum, shared.own[side], key, shared.stream[stage][side], row,
                                    lane);
  } else {
#pragma unroll 1
    for (int column = 0; column < columns; column += Tile::kDepth) {
      __syncthreads();
      load_tile<Tile::kThreads>(shared.own[side], own(column));
      load_tile<Tile::kThreads>(shared.stream[0][side], stream(column));
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      Sum part;  // summed up part by part: long dot products lose less
      part.clear();
      Arithmetic::multiply_transposed(part, shared.own[side], key, shared.stream[0][side], row,
                                      lane);
      sum.add(part);
    }
  }
}

// The numbers of a row tile, from the workspace: contiguous, and whole tiles always exist.
template <class Tile, class Shared>
__device__ __forceinline__ void load_row_terms(Shared& shared, int stage,
                                               const BackwardArguments& a, int64_t padded_row) {
  using Real = typename Tile::Real;
  constexpr int kChunk = 16 / sizeof(Real), kChunks = Tile::kRows / kChunk;
  auto& terms = shared.row_terms[stage];
  for (int i = threadIdx.x; i < 3 * kChunks; i += Tile::kThreads) {
    const int array = i / kChunks, at = i % kChunks * kChunk;
    const void* from = array == 0 ? a.lse_high : array == 1 ? a.lse_low : a.deltas;
    Real* to = array == 0 ? terms.lse_high : array == 1 ? terms.lse_low : terms.deltas;
    ptx::cp_async_16(ptx::shared_address(to + at), static_cast<const Real*>(from) + padded_row + at,
                     true);
  }
}

// Decides dropout for the tile from (row, key) on; a barrier comes before its use.
template <class Tile, class Terms, class Shared>
__device__ __forceinline__ void fill_dropout(Shared& shared, int parity, const AttentionProblem& p,
                                             int batch, int head, int row, int key) {
  if constexpr (Terms::kDropout) {
    if (!Terms::drops(p)) return;
    const DropoutStream stream = p.dropout.stream(batch, p.heads_q, head);
    shared.dropout[parity].template fill<Tile::kThreads>(stream, row, key);
  }
}

// Fills the terms of attn_mask for the tile from (row, key) on. Ends with a barrier if there is
// anything to fill.
template <class Tile, class Terms, class Shared>
__device__ __forceinline__ void fill_general_terms(Shared& shared, const BackwardArguments& a,
                                                   int batch, int head, int row, int key, int len_q,
                                                   int len_k) {
  const AttentionProblem& p = a.problem;
  if constexpr (Terms::kGeneral) {
    if (p.attn_mask) {
      const BiasSource source(p.attn_mask, a.chunked.bias, batch, head, len_q, len_k);
      fill_bias<Tile::kThreads>(shared.bias[0], row, key, source);
      __syncthreads();
    }
  }
}

// By what the loss is differentiated: scaled dot products, or scores, which softcap and the terms
// added to them lie between.
enum class GradientOf { dot_product, score };

// From dot products and grad_out * value^T of a warp to the probabilities that dropout keeps (in
// `dots`; what they are scaled by is left to the end) and the gradient (in `grads`).
// The warp's fragments begin at (warp_key, warp_row) of the tile from (key, row) on, where
// attn_mask is `tile_summary`.
template <class Tile, GradientOf gradient_of, class Terms, class Shared, int F, int Blocks>
__device__ __forceinline__ void gradient_step(const BackwardArguments& a, const Terms& terms,
                                              const Shared& shared, int stage, int parity,
                                              uint32_t tile_summary, int key, int row, int warp_key,
                                              int warp_row, bool hidden_pairs,
                                              Accumulators<typename Tile::Real, F, Blocks>& dots,
                                              Accumulators<typename Tile::Real, F, Blocks>& grads,
                                              int lane) {
  using Real = typename Tile::Real;
  const AttentionProblem& p = a.problem;
  const auto& rows = shared.row_terms[stage];
  const int first = warp_row + 2 * (lane % 4);
  const Real keep_scale = static_cast<Real>(p.dropout.keep_scale());
#pragma unroll
  for (int f = 0; f < F; ++f) {
    auto& dot = dots.value[f];
    auto& grad = grads.value[f];
    const KeyPosition in_tile{warp_key + 16 * f + lane / 4, first};
    const KeyPosition at{key + in_tile.key, row + in_tile.row};
    if constexpr (Terms::kDropout) {
      if (Terms::drops(p)) {
        shared.dropout[parity].template visit<Blocks>(in_tile, [&](int b, int e, bool kept) {
          grad[b][e] = kept ? grad[b][e] * keep_scale : Real(0);
        });
      }
    }
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[b][e] -= rows.deltas[first + 8 * b + e % 2];
    }
    if constexpr (Terms::kGeneral) {
      const BiasView bias{shared.bias[0], row, key};
      terms.apply(dot, at, bias, [&](int b, int e, Real slope) {
        if (gradient_of == GradientOf::dot_product) grad[b][e] *= slope;
      });
    } else if constexpr (Terms::kMasked) {
      shared.bias[stage].apply(dot, KeyPosition{warp_key + 16 * f, warp_row}, terms.scale,
                               p.attn_mask.dtype, tile_summary);
    }
    if (hidden_pairs) hide(dot, at, shared.mask);
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = first + 8 * b + e % 2;
        dot[b][e] = terms.probability(dot[b][e], {rows.lse_high[i], rows.lse_low[i]});
        grad[b][e] *= dot[b][e];
      }
    }
    if constexpr (Terms::kDropout) {
      if (Terms::drops(p)) {
        shared.dropout[parity].template visit<Blocks>(
            in_tile, [&](int b, int e, bool kept) { dot[b][e] = kept ? dot[b][e] : Real(0); });
      }
    }
  }
}

}  // namespace flashattn::cuda::portable
