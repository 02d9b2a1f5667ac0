// Flash attention forward for sm_80 and newer (FlashAttention-2, arXiv:2307.08691).
//
// A block owns a tile of query rows and walks over the key tiles that those rows see. Per key tile:
//   keys arrive  ->  scores = query * keys^T  (values arrive meanwhile)
//   scores -> mask -> softmax step            (the next keys arrive meanwhile)
//   out += probabilities * values
// On tensor cores probabilities never leave the registers: accumulators of one product are operands
// of the next.
#pragma once

#include "cuda/attend/bias.cuh"
#include "cuda/attend/dropout.cuh"
#include "cuda/attend/mask_tile.cuh"
#include "cuda/attend/max_logits.cuh"
#include "cuda/attend/softmax_step.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/flash/packed_tiles.cuh"
#include "cuda/flash/portable/store.cuh"
#include "cuda/flash/portable/tiles.cuh"
#include "cuda/tile/load_tile.cuh"

namespace flashattn::cuda::portable {

template <class Tile, class Scores>
struct ForwardShared {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  SharedTile<Element, Tile::kRows, Tile::kDepth> query;
  SharedTile<Element, Tile::kKeys, Tile::kDepth> keys[Tile::kStages];
  SharedTile<Element, Tile::kKeys, Tile::kValueDim> values[Tile::kStages];
  typename Arithmetic::template Scratch<Tile::kRows, Tile::kKeys> scratch;
  typename Scores::template Bias<Tile::kRows, Tile::kKeys> bias;
  TileMask mask;  // seldom needed: not worth registers
  RowBasesOf<Scores, Tile::kFragments, Tile::kThreads> bases;
};

template <class Tiles, class Scores>
__global__ void __launch_bounds__(DeviceTile<Tiles>::kThreads,
                                  DeviceTile<Tiles>::kBlocksPerMultiprocessor)
    flash_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Tile = DeviceTile<Tiles>;
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Tile, Scores>*>(shared_bytes);
  const AttentionProblem& p = arguments.problem;
  ForwardTask task = arguments.task<Tile::kRows, Tile::kValueDim>(blockIdx.x);
  if (p.sequences.packed()) {
    const SequenceTile tile =
        sequence_tile(p.sequences.cu_q, p.sequences.storage_q, static_cast<int>(p.sequences.count),
                      Tile::kRows, task.row / Tile::kRows);
    task.batch = tile.sequence;
    task.row = tile.first;
  }
  Sequence sequence = p.sequences[task.batch];
  const int len_q = static_cast<int>(sequence.len_q);
  int len_k = static_cast<int>(sequence.len_k);
  TileMask mask = p.mask_rule.for_sequence<int>(arguments.rows_are_heads ? 1 : len_q, len_k);
  if (arguments.rows_are_heads) {
    // All of them see the same range of keys, which is all that there is from here on.
    const TileRange seen = mask.keys_for({0, 1});
    sequence.k_begin += seen.begin;
    len_k = seen.size();
    mask = MaskRule{}.for_sequence<int>(len_q, len_k);
  }
  if (threadIdx.x == 0) shared.mask = mask;
  const TileRange rows{task.row, min(task.row + Tile::kRows, len_q)};
  if (rows.empty()) return;

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * Tile::kFragments;
  TileRange seen = mask.keys_for(rows);
  const TileRange all_see = mask.keys_for_all({rows.begin, rows.begin + Tile::kRows});
  int first_key = seen.begin / Tile::kKeys * Tile::kKeys;
  if (arguments.splits.value() > 1) {
    const int tiles = (seen.end - first_key + Tile::kKeys - 1) / Tile::kKeys;
    const int run =
        arguments.splits.divide(tiles + arguments.splits.value() - 1).quotient * Tile::kKeys;
    first_key += task.split * run;
    seen.end = min(seen.end, first_key + run);
  }
  const int kv_head = arguments.group.divide(task.head).quotient;
  const int head_dim = static_cast<int>(p.head_dim);
  const int value_columns = static_cast<int>(p.head_dim_v) - task.value_column;
  const auto query = p.query.as<const Element>();
  const auto key = p.key.as<const Element>();
  const auto value = p.value.as<const Element>();
  const Element* const head_keys = key.at(task.batch, kv_head, sequence.k_begin);
  const Element* const head_values =
      value.at(task.batch, kv_head, sequence.k_begin, task.value_column);
  const auto load_query = [&](int column) {
    load_tile<Tile::kThreads>(
        shared.query,
        GlobalMatrix<Element>{
            query.at(task.batch, task.head, sequence.q_begin + rows.begin, column), query.stride[2],
            query.stride[3], rows.size(), head_dim - column, arguments.chunked.query});
  };
  const auto load_keys = [&](int stage, int from, int column) {
    load_tile<Tile::kThreads>(
        shared.keys[stage],
        GlobalMatrix<Element>{head_keys + from * key.stride[2] + column * key.stride[3],
                              key.stride[2], key.stride[3], seen.end - from, head_dim - column,
                              arguments.chunked.key});
    ptx::cp_async_commit();
  };
  const MaskSummary& summary = arguments.mask_summary;
  // What attn_mask holds of a key tile, and the first key tile from one on that it leaves something
  // of.
  const auto summary_of = [&](int from) {
    return summary.of_tile<Tile::kRows, Tile::kKeys>(task.batch, task.head, rows.begin, from);
  };
  const auto first_visible = [&](int from) {
    if constexpr (Scores::kGeneral || Scores::kMasked) {
      while (from < seen.end && !(summary_of(from) & MaskSummary::kSomeVisible)) {
        from += Tile::kKeys;
      }
    }
    return from;
  };
  const auto load_values = [&](int stage, int from) {
    load_tile<Tile::kThreads>(
        shared.values[stage],
        GlobalMatrix<Element>{head_values + from * value.stride[2], value.stride[2],
                              value.stride[3], seen.end - from, value_columns,
                              arguments.chunked.value});
    if constexpr (Scores::kMasked) {
      shared.bias.template load<Tile::kThreads>(p.attn_mask, task.batch, task.head, rows.begin,
                                                from, rows.size(), seen.end - from);
    }
    ptx::cp_async_commit();
  };

  const auto prefetch = [&](int stage, int from) {
    if (!Tile::kWhole || from >= seen.end) return;
    load_keys(stage, from, 0);
    if (Tile::kStages > 1) load_values(stage, from);
  };

  first_key = first_visible(first_key);
  if (Tile::kWhole) load_query(0);
  ptx::cp_async_commit();
  prefetch(0, first_key);

  const Scores terms(p, task.batch, task.head, mask);
  // In 16 bits whoever asks for them is given general scores.
  constexpr bool kHasMaxLogits = Scores::kGeneral || sizeof(Element) == 4;
  SoftmaxRows<Real> softmax[Tile::kFragments];
  Accumulators<Real, Tile::kFragments, Tile::kValueDim / 8> out;
  out.clear();
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
    softmax[f].start(task.split == 0 ? Scores::initial_max(p, task.head) : kNegativeInfinity<Real>,
                     lane);
    if constexpr (kHasBases<decltype(shared.bases)>) {
      for (int half = 0; half < 2; ++half) shared.bases.of(f, half) = kNegativeInfinity<Real>;
    }
  }
  float max_logit = kNegativeInfinity<float>;

#pragma unroll 1
  for (int first = first_key, next, stage = 0; first < seen.end; first = next) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the keys are here, and everybody is done with the values before
    if constexpr (Tile::kStages == 1) {
      load_values(0, first);
    } else {
      next = first_visible(first + Tile::kKeys);
      prefetch(stage ^ 1, next);
    }
    if constexpr (Scores::kGeneral) {
      if (p.attn_mask) {
        const BiasSource source(p.attn_mask, arguments.chunked.bias, task.batch, task.head, len_q,
                                len_k);
        fill_bias<Tile::kThreads>(shared.bias, rows.begin, first, source);
      }
    }
    Accumulators<Real, Tile::kFragments, Tile::kKeys / 8> scores;
    scores.clear();
    if constexpr (Tile::kWhole) {
      Arithmetic::multiply_transposed(scores, shared.query, warp_row, shared.keys[stage], 0, lane);
    } else {
#pragma unroll 1
      for (int column = 0; column < head_dim; column += Tile::kDepth) {
        __syncthreads();
        load_query(column);
        load_keys(0, first, column);
        ptx::cp_async_wait<0>();
        __syncthreads();
        decltype(scores) part;  // summed up part by part: long dot products lose less
        part.clear();
        Arithmetic::multiply_transposed(part, shared.query, warp_row, shared.keys[0], 0, lane);
        scores.add(part);
      }
    }
    if constexpr (Tile::kStages == 1) {
      ptx::cp_async_wait<0>();
      if constexpr (Scores::kMasked) shared.bias.template interleave<Tile::kThreads>(p.attn_mask);
      __syncthreads();  // values and mask are here, and everybody is done with the keys
      next = first_visible(first + Tile::kKeys);
      prefetch(0, next);
    }

    // Keys past the sequence's end are hidden too, so a short last tile is never all visible.
    const bool hidden_pairs = first < all_see.begin || first + Tile::kKeys > all_see.end;
    const auto position = [&](int f) {
      return RowPosition{rows.begin + warp_row + 16 * f + lane / 4, first + 2 * (lane % 4)};
    };
    if constexpr (Scores::kGeneral) {
      const BiasView bias{shared.bias, rows.begin, first};
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
        terms.apply(scores.value[f], position(f), bias, [](int, int, Real) {});
      }
    } else if constexpr (Scores::kMasked) {
      const uint32_t tile_summary = summary_of(first);
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
        shared.bias.apply(scores.value[f], RowPosition{warp_row + 16 * f, 0}, terms.scale,
                          p.attn_mask.dtype, tile_summary);
      }
    }
    if (hidden_pairs) {
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) hide(scores.value[f], position(f), shared.mask);
    }
    if constexpr (kHasMaxLogits) {
      if (arguments.outputs.max_logits) {
#pragma unroll
        for (int f = 0; f < Tile::kFragments; ++f) {
          max_logit = max_of(max_logit, scores.value[f], position(f), rows.end);
        }
      }
    }
    softmax_step(softmax, scores.value, out.value, terms, shared.bases);
    if constexpr (Scores::kDropout) {
      if (Scores::drops(p)) {
        const DropoutStream stream = p.dropout.stream(task.batch, p.heads_q, task.head);
#pragma unroll
        for (int f = 0; f < Tile::kFragments; ++f) {
          visit_dropout<Tile::kKeys / 8>(stream, position(f), [&](int b, int e, bool kept) {
            if (!kept) scores.value[f][b][e] = 0;
          });
        }
      }
    }
    Arithmetic::multiply_accumulators(out, scores, shared.values[stage], shared.scratch, lane);
    if (Tile::kStages > 1) stage ^= 1;
  }

  const auto lse = arguments.outputs.lse.as<Real>();
  const auto lse_low = arguments.outputs.lse_low.as<Real>();
  const Real keep_scale = Scores::drops(p) ? static_cast<Real>(p.dropout.keep_scale()) : Real(1);
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real total = softmax[f].total(half);
      // A row that saw no key gives 0.
      const Real factor = total == Real(0) ? Real(0) : keep_scale / total;
#pragma unroll
      for (int b = 0; b < Tile::kValueDim / 8; ++b) {
        out.value[f][b][2 * half] *= factor;
        out.value[f][b][2 * half + 1] *= factor;
      }
      const int row = rows.begin + warp_row + 16 * f + lane / 4 + 8 * half;
      if (row >= rows.end) continue;
      if (arguments.splits.value() > 1) {
        const int64_t index =
            task.split * arguments.rows() +
            (int64_t{task.batch} * p.heads_q + task.head) * p.sequences.storage_q + row;
        Real* const to =
            static_cast<Real*>(arguments.partial_out) + index * p.head_dim_v + task.value_column;
#pragma unroll
        for (int b = 0; b < Tile::kValueDim / 8; ++b) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * b + 2 * (lane % 4) + e;
            if (column < value_columns) to[column] = out.value[f][b][2 * half + e];
          }
        }
        static_cast<LogSumExp<Real>*>(arguments.partial_lse)[index] =
            softmax[f].log_sum_exp(half, total, terms, shared.bases, f);
      } else if (lane % 4 == 0 && task.value_column == 0) {
        const LogSumExp<Real> row_lse = softmax[f].log_sum_exp(half, total, terms, shared.bases, f);
        *lse.at(task.batch, task.head, sequence.q_begin + row) = row_lse.high;
        if (lse_low) *lse_low.at(task.batch, task.head, sequence.q_begin + row) = row_lse.low;
      }
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // nobody loads or reads queries any more: results are staged in their place
  // What rounding lost goes second.
  const auto store = [&](const UntypedView4& view) {
    const auto to = view.as<Element>();
    store_rows<Arithmetic>(
        out, shared.query, warp_row, 0,
        {to.at(task.batch, task.head, sequence.q_begin + rows.begin, task.value_column),
         to.stride[2], to.stride[3], rows.size(), value_columns, arguments.chunked.out},
        lane);
  };
#pragma unroll 1
  for (int lost = 0; lost < 2 && arguments.splits.value() == 1; ++lost) {
    const UntypedView4& view = lost ? arguments.outputs.out_low : arguments.outputs.out;
    if (!view) break;
    if (lost) {
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
        for (int b = 0; b < Tile::kValueDim / 8; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            out.value[f][b][e] = rounding_error<Element>(out.value[f][b][e]);
          }
        }
      }
    }
    store(view);
  }
  if constexpr (kHasMaxLogits) {
    if (arguments.outputs.max_logits) {
      if constexpr (!Scores::kGeneral) max_logit *= static_cast<float>(p.scale);
      atomic_max(arguments.outputs.max_logits.as<float>().at(task.batch, task.head), max_logit);
    }
  }
}

}  // namespace flashattn::cuda::portable
