// Flash attention forward for sm_80 and newer (FlashAttention-2, arXiv:2307.08691).
//
// A block owns a tile of query rows and walks over the key tiles that those rows see. Per key tile:
//   keys arrive  ->  scores = query * keys^T  (values arrive meanwhile)
//   scores -> mask -> softmax step            (the next keys arrive meanwhile)
//   out += probabilities * values
// On tensor cores probabilities never leave the registers: accumulators of one product are operands
// of the next.
#pragma once

#include "core/tile_schedule.h"
#include "cuda/attend/max_logits.cuh"
#include "cuda/attend/scores.cuh"
#include "cuda/attend/softmax_step.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/flash/portable/tiles.cuh"
#include "cuda/tile/load_tile.cuh"

namespace flashattn::cuda::portable {

template <class Tile>
struct ForwardShared {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  SharedTile<Element, Tile::kRows, Tile::kHeadDim> query;
  SharedTile<Element, Tile::kKeys, Tile::kHeadDim> keys;
  SharedTile<Element, Tile::kKeys, Tile::kValueDim> values;
  typename Arithmetic::template Scratch<Tile::kRows, Tile::kKeys> scratch;
};

// What is stored of a number: its rounded value, or what rounding lost.
enum class Rounding { kept, lost };

// One row of a fragment to `out`: this lane's pairs of columns.
template <Rounding rounding, class Element, class Real, int Blocks>
__device__ __forceinline__ void store_row(const Real (&from)[Blocks][4], int half, Real factor,
                                          Element* to, int64_t stride, int columns, bool paired,
                                          int lane) {
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    const int column = 8 * b + 2 * (lane % 4);
    Element pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Real value = from[b][2 * half + e] * factor;
      pair[e] =
          convert<Element>(rounding == Rounding::kept ? value : rounding_error<Element>(value));
    }
    if (paired) {
      struct alignas(2 * sizeof(Element)) Pair {
        Element element[2];
      };
      if (column < columns) *reinterpret_cast<Pair*>(to + column) = {{pair[0], pair[1]}};
    } else {
      if (column < columns) to[column * stride] = pair[0];
      if (column + 1 < columns) to[(column + 1) * stride] = pair[1];
    }
  }
}

template <class Tile, class Scores>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    flash_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile>*>(shared_bytes);
  const AttentionProblem& p = arguments.problem;
  const ForwardTask task = arguments.task(blockIdx.x);
  const Sequence sequence = p.sequences[task.batch];
  const SequenceMask mask = p.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
  const Range rows{task.row, min(task.row + Tile::kRows, sequence.len_q)};
  if (rows.empty()) return;

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * Tile::kFragments;
  const Tiles tiles = aligned_tiles(mask.keys_for(rows), Tile::kKeys);
  const int64_t kv_head = p.kv_head(task.head);
  const int value_columns = static_cast<int>(p.head_dim_v) - task.value_column;
  const auto query = p.query.as<const Element>();
  const auto key = p.key.as<const Element>();
  const auto value = p.value.as<const Element>();
  const auto load_keys = [&](Range keys) {
    load_tile<Tile::kThreads>(
        shared.keys,
        GlobalMatrix<Element>{key.at(task.batch, kv_head, sequence.k_begin + keys.begin),
                              key.stride[2], key.stride[3], static_cast<int>(keys.size()),
                              static_cast<int>(p.head_dim), arguments.chunked_key});
    ptx::cp_async_commit();
  };
  const auto load_values = [&](Range keys) {
    load_tile<Tile::kThreads>(
        shared.values,
        GlobalMatrix<Element>{
            value.at(task.batch, kv_head, sequence.k_begin + keys.begin, task.value_column),
            value.stride[2], value.stride[3], static_cast<int>(keys.size()), value_columns,
            arguments.chunked_value});
    ptx::cp_async_commit();
  };

  load_tile<Tile::kThreads>(
      shared.query,
      GlobalMatrix<Element>{query.at(task.batch, task.head, sequence.q_begin + rows.begin),
                            query.stride[2], query.stride[3], static_cast<int>(rows.size()),
                            static_cast<int>(p.head_dim), arguments.chunked_query});
  if (tiles.count() > 0) load_keys(tiles[0]);

  const Scores terms(p, task.batch, task.head, mask);
  SoftmaxRows<Real> softmax[Tile::kFragments];
  Accumulators<Real, Tile::kFragments, Tile::kValueDim / 8> out;
  out.clear();
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f)
    softmax[f].start(Scores::initial_max(p, task.head), lane);
  float max_logit = kNegativeInfinity<float>;

  for (int64_t t = 0; t < tiles.count(); ++t) {
    const Range keys = tiles[t];
    ptx::cp_async_wait<0>();
    __syncthreads();  // the keys are here, and everybody is done with the values before
    load_values(keys);
    Accumulators<Real, Tile::kFragments, Tile::kKeys / 8> scores;
    scores.clear();
    Arithmetic::multiply_transposed(scores, shared.query, warp_row, shared.keys, 0, lane);
    ptx::cp_async_wait<0>();
    __syncthreads();  // the values are here, and everybody is done with the keys
    if (t + 1 < tiles.count()) load_keys(tiles[t + 1]);

    // Keys past the sequence's end are hidden too, so a short last tile is never all visible.
    const bool hidden_pairs = !mask.all_visible({task.row, task.row + Tile::kRows},
                                                {keys.begin, keys.begin + Tile::kKeys});
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
      const RowPosition at{rows.begin + warp_row + 16 * f + lane / 4, keys.begin + 2 * (lane % 4)};
      terms.apply(scores.value[f], at);
      if (hidden_pairs) hide(scores.value[f], at, mask);
      if constexpr (Scores::kGeneral) {
        if (arguments.outputs.max_logits) {
          max_logit = max_of(max_logit, scores.value[f], at, rows.end);
        }
      }
      softmax[f].step(scores.value[f], out.value[f], terms);
      if constexpr (Scores::kGeneral) {
        if (p.dropout) {
          visit_dropout<Tile::kKeys / 8>(p.dropout.stream(task.batch, p.heads_q, task.head), at,
                                         [&](int b, int e, bool kept) {
                                           if (!kept) scores.value[f][b][e] = 0;
                                         });
        }
      }
    }
    Arithmetic::multiply_accumulators(out, scores, shared.values, shared.scratch, lane);
  }

  const auto out_view = arguments.outputs.out.as<Element>();
  const auto out_low = arguments.outputs.out_low.as<Element>();
  const auto lse = arguments.outputs.lse.as<Real>();
  const auto lse_low = arguments.outputs.lse_low.as<Real>();
  const Real keep_scale = p.dropout ? static_cast<Real>(p.dropout.keep_scale()) : Real(1);
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const OnlineSoftmax<Real> state = softmax[f].finish(half, terms);
      const int64_t row = rows.begin + warp_row + 16 * f + lane / 4 + 8 * half;
      if (row >= rows.end) continue;
      const int64_t stored_row = sequence.q_begin + row;
      const Real factor = state.inverse_sum() * keep_scale;
      store_row<Rounding::kept>(out.value[f], half, factor,
                                out_view.at(task.batch, task.head, stored_row, task.value_column),
                                out_view.stride[3], value_columns, arguments.paired_out, lane);
      if (out_low) {
        store_row<Rounding::lost>(out.value[f], half, factor,
                                  out_low.at(task.batch, task.head, stored_row, task.value_column),
                                  out_low.stride[3], value_columns, arguments.paired_out, lane);
      }
      if (lane % 4 == 0 && task.value_column == 0) {
        LogSumExp<Real> row_lse = state.log_sum_exp();
        if (state.sum != 0) row_lse.low += terms.natural_low(softmax[f].reference[half]);
        *lse.at(task.batch, task.head, stored_row) = row_lse.high;
        if (lse_low) *lse_low.at(task.batch, task.head, stored_row) = row_lse.low;
      }
    }
  }
  if constexpr (Scores::kGeneral) {
    if (arguments.outputs.max_logits) {
      atomic_max(arguments.outputs.max_logits.as<float>().at(task.batch, task.head), max_logit);
    }
  }
}

}  // namespace flashattn::cuda::portable
