// What the backward kernels share: their tiles, and the step from scores to their gradients.
//
// Two kernels, one shape. A block owns 16-row fragments of one side and streams the other:
//   grad_query       owns query, grad_out   streams key, value       fragments (query rows, keys)
//   grad_key_value   owns key, value        streams query, grad_out  fragments (keys, query rows)
// Either way the probabilities and score gradients stay in the registers that they were computed in
// and are the left operand of the next product. Nothing is added with atomics: bitwise
// reproducible.
#pragma once

#include <limits>

#include "core/tile_schedule.h"
#include "cuda/attend/scores.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/tile/load_tile.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn::cuda::portable {

// kHeadDim covers head_dim and head_dim_v. Where the four operand tiles of that width do not fit
// into shared memory, products run over kDepth columns at a time, and a block makes kSlice columns
// of the gradients.
template <class Arithmetic_, int HeadDim, int Depth, int Slice, int Own, int Stream, int Warps,
          int Blocks>
struct GradientTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = HeadDim, kDepth = Depth, kSlice = Slice;
  static constexpr int kOwn = Own, kStream = Stream;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps;
  static constexpr int kBlocksPerMultiprocessor = Blocks;
  static constexpr int kFragments = Own / (16 * Warps);
  static constexpr bool kWhole = Depth == HeadDim && Slice == HeadDim;
};

template <class Tile>
struct GradientShared {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  SharedTile<Element, Tile::kOwn, Tile::kDepth> own[2];        // query, grad_out | key, value
  SharedTile<Element, Tile::kStream, Tile::kDepth> stream[2];  // key, value | query, grad_out
  // Columns of the streamed side that are multiplied with; the stream tiles themselves when whole.
  SharedTile<Element, Tile::kWhole ? 8 : Tile::kStream, Tile::kSlice> slice[2];
  typename Arithmetic::template Scratch<Tile::kOwn, Tile::kStream> scratch;
  Real lse[Tile::kStream], lse_low[Tile::kStream], deltas[Tile::kStream];
};

// A matrix of one head: rows [first, first + rows) of a view, columns [column, column + columns).
template <class Element>
__device__ __forceinline__ GlobalMatrix<Element> head_matrix(const UntypedView4& view,
                                                             int64_t batch, int64_t head,
                                                             int64_t first, int64_t rows,
                                                             int column, int columns,
                                                             bool chunked) {
  const auto typed = view.as<const Element>();
  return {typed.at(batch, head, first, column),
          view.stride[2],
          view.stride[3],
          static_cast<int>(rows),
          columns - column,
          chunked};
}

// sum (own rows, streamed rows) = own * stream^T over the whole head dim. `own` and `stream` give
// the matrix from a column on. When everything is resident the tiles hold it already.
template <class Tile, class Sum, class Own, class Stream>
__device__ __forceinline__ void product(Sum& sum, GradientShared<Tile>& shared, int side,
                                        int columns, const Own& own, const Stream& stream,
                                        int warp_row, int lane) {
  using Arithmetic = typename Tile::Arithmetic;
  sum.clear();
  if constexpr (Tile::kWhole) {
    Arithmetic::multiply_transposed(sum, shared.own[side], warp_row, shared.stream[side], 0, lane);
  } else {
#pragma unroll 1
    for (int column = 0; column < columns; column += Tile::kDepth) {
      __syncthreads();
      load_tile<Tile::kThreads>(shared.own[side], own(column));
      load_tile<Tile::kThreads>(shared.stream[side], stream(column));
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      Arithmetic::multiply_transposed(sum, shared.own[side], warp_row, shared.stream[side], 0,
                                      lane);
    }
  }
}

// A row's lse as backward uses it. A row that saw no key has probability 0 everywhere.
template <class Real>
struct RowTerms {
  Real lse, lse_low, delta;

  __device__ static RowTerms none() { return {std::numeric_limits<Real>::infinity(), 0, 0}; }

  // `row` is a row of the storage.
  __device__ static RowTerms load(const BackwardArguments& a, int64_t batch, int64_t head,
                                  int64_t row) {
    const Real lse = *a.inputs.lse.as<const Real>().at(batch, head, row);
    if (lse == kNegativeInfinity<Real>) return none();
    const auto low = a.inputs.lse_low.as<const Real>();
    return {lse, low ? *low.at(batch, head, row) : Real(0),
            *a.deltas.as<const Real>().at(batch, head, row)};
  }
};

// From dot products and grad_out * value^T of a fragment to the probabilities after dropout (in
// `dots`) and d loss / d score (in `grads`). `row_terms(block, element)` gives the row's terms,
// `visit(block, element, grad)` sees d loss / d score; `grads` ends as d loss / d dot product.
template <class Terms, class Position, class Real, int Blocks, class RowTermsOf, class Visit>
__device__ __forceinline__ void gradient_step(const AttentionProblem& p, const Terms& terms,
                                              const DropoutStream& stream, const Position& at,
                                              const SequenceMask& mask, bool hidden_pairs,
                                              Real (&dots)[Blocks][4], Real (&grads)[Blocks][4],
                                              const RowTermsOf& row_terms, const Visit& visit) {
  Real slopes[Blocks][4];
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) slopes[b][e] = terms.slope_at(dots[b][e]);
  }
  terms.apply(dots, at);
  if (hidden_pairs) hide(dots, at, mask);
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowTerms<Real> row = row_terms(b, e);
      dots[b][e] = terms.probability(dots[b][e], row.lse, row.lse_low);
    }
  }
  const auto finish = [&](int b, int e, Real factor) {
    const Real grad = score_gradient(dots[b][e], grads[b][e], factor, row_terms(b, e).delta);
    dots[b][e] *= factor;
    visit(b, e, grad);
    grads[b][e] = grad * slopes[b][e];
  };
  if (Terms::kGeneral && p.dropout) {
    const Real keep_scale = static_cast<Real>(p.dropout.keep_scale());
    visit_dropout<Blocks>(stream, at,
                          [&](int b, int e, bool kept) { finish(b, e, kept ? keep_scale : 0); });
  } else {
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) finish(b, e, Real(1));
    }
  }
}

template <class Arithmetic, int HeadDim>
struct QueryGradientTileOf;
template <class Arithmetic, int HeadDim>
struct KeyGradientTileOf;

#define FLASHATTN_GRADIENT_TILE(Of, Arithmetic, HeadDim, ...) \
  template <>                                                 \
  struct Of<Arithmetic, HeadDim> : GradientTile<Arithmetic, HeadDim, __VA_ARGS__> {}
#define FLASHATTN_16BIT_TILE(Of, HeadDim, ...)                             \
  FLASHATTN_GRADIENT_TILE(Of, TensorCores<float16>, HeadDim, __VA_ARGS__); \
  FLASHATTN_GRADIENT_TILE(Of, TensorCores<bfloat16>, HeadDim, __VA_ARGS__)

//                                         depth slice  own stream warps blocks
FLASHATTN_16BIT_TILE(QueryGradientTileOf, 64, 64, 64, 128, 64, 8, 1);
FLASHATTN_16BIT_TILE(QueryGradientTileOf, 128, 128, 128, 128, 64, 8, 1);
FLASHATTN_16BIT_TILE(QueryGradientTileOf, 256, 256, 128, 64, 64, 4, 1);
FLASHATTN_16BIT_TILE(QueryGradientTileOf, 512, 128, 128, 64, 64, 4, 1);
FLASHATTN_16BIT_TILE(KeyGradientTileOf, 64, 64, 64, 128, 64, 8, 1);
FLASHATTN_16BIT_TILE(KeyGradientTileOf, 128, 128, 128, 128, 64, 8, 1);
FLASHATTN_16BIT_TILE(KeyGradientTileOf, 256, 256, 128, 64, 64, 4, 1);
FLASHATTN_16BIT_TILE(KeyGradientTileOf, 512, 128, 128, 64, 64, 4, 1);
FLASHATTN_GRADIENT_TILE(QueryGradientTileOf, MultiplyAdds<float>, 64, 64, 64, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(QueryGradientTileOf, MultiplyAdds<float>, 128, 128, 128, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(QueryGradientTileOf, MultiplyAdds<float>, 512, 64, 128, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(KeyGradientTileOf, MultiplyAdds<float>, 64, 64, 64, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(KeyGradientTileOf, MultiplyAdds<float>, 128, 128, 128, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(KeyGradientTileOf, MultiplyAdds<float>, 512, 64, 64, 64, 32, 4, 1);
FLASHATTN_GRADIENT_TILE(QueryGradientTileOf, MultiplyAdds<double>, 512, 64, 64, 32, 32, 2, 1);
FLASHATTN_GRADIENT_TILE(KeyGradientTileOf, MultiplyAdds<double>, 512, 64, 64, 32, 32, 2, 1);
#undef FLASHATTN_16BIT_TILE
#undef FLASHATTN_GRADIENT_TILE

}  // namespace flashattn::cuda::portable
