// Flash attention backward for sm_80 and newer (FlashAttention-2, arXiv:2307.08691).
//
// A block owns keys and walks over the query rows, of every head of the group, that see them:
//   scores^T = key * query^T,  grads^T = value * grad_out^T        (the next rows arrive meanwhile)
//   -> probabilities^T, score gradients^T
//   grad_value += probabilities^T * grad_out,  grad_key += score gradients^T * query
//   grad_query += score gradients * key        (added to a workspace that all blocks of a head
//   share)
// The sums in the workspace lie in the order of the accumulators; a last kernel (row_kernels.cuh)
// makes grad_query of them. Added in any order they differ in the last bits from run to run; the
// deterministic mode takes turns.
#pragma once

#include "cuda/attend/scores.cuh"
#include "cuda/flash/packed_tiles.cuh"
#include "cuda/flash/portable/store.cuh"
#include "cuda/flash/portable/tiles.cuh"
#include "cuda/ptx/reduce.cuh"

namespace flashattn::cuda::portable {

// Called by the whole block.
__device__ __forceinline__ void wait_for(const int* turn, int mine) {
  if (threadIdx.x == 0) {
    while (ptx::acquire(turn) != mine) {
    }
  }
  __syncthreads();
}

// Heads of the block order: (batch, heads_kv, slices of the head dims), slowest first.
template <class Tiles, class Terms>
__global__ void __launch_bounds__(DeviceTile<Tiles>::kThreads,
                                  DeviceTile<Tiles>::kBlocksPerMultiprocessor)
    flash_backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Tile = DeviceTile<Tiles>;
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Tile::Element;
  using Real = typename Tile::Real;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile, Terms>*>(shared_bytes);
  const AttentionProblem& p = a.problem;

  // Early keys are seen by most rows under a causal mask and go first. Turns go from the last key
  // tile to the first, so that a causal mask makes nobody wait.
  const BlockOrder::Place place = a.order[blockIdx.x];
  int part = a.deterministic ? a.order.parts() - 1 - place.part : place.part;
  const Divisor::Result slice_of = a.slices.divide(place.head);
  const Divisor::Result kv_head_of = a.heads_kv.divide(slice_of.quotient);
  const int slice = slice_of.rest * Tile::kSlice, kv_head = kv_head_of.rest;
  const int group = a.group.value();
  int batch = kv_head_of.quotient;
  if (p.sequences.packed()) {
    const SequenceTile tile = sequence_tile(p.sequences.cu_k, p.sequences.storage_k,
                                            static_cast<int>(p.sequences.count), Tile::kKeys, part);
    batch = tile.sequence;
    part = tile.first / Tile::kKeys;
  }
  const Sequence sequence = p.sequences[batch];
  const int len_q = static_cast<int>(sequence.len_q), len_k = static_cast<int>(sequence.len_k);
  const TileMask mask = p.mask_rule.for_sequence<int>(len_q, len_k);
  const TileRange keys{part * Tile::kKeys, min((part + 1) * Tile::kKeys, len_k)};
  // Dense keys past the sequence's end still have gradients: zeros.
  const int stored_keys = p.sequences.packed() ? len_k : static_cast<int>(p.sequences.storage_k);
  if (keys.begin >= stored_keys) return;
  if (threadIdx.x == 0) shared.mask = mask;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_key = warp % Tile::kKeyWarps * 16 * Tile::kFragments;
  const int column_warp = warp / Tile::kKeyWarps;
  const int warp_row = column_warp * Tile::kWarpRows;
  constexpr int kWarpColumns = Tile::kSlice / Tile::kColumnWarps;
  const auto key = [&](int column) {
    return head_matrix<Element>(p.key, batch, kv_head, sequence.k_begin + keys.begin, keys.size(),
                                column, a.chunked.key);
  };
  const auto value = [&](int column) {
    return head_matrix<Element>(p.value, batch, kv_head, sequence.k_begin + keys.begin, keys.size(),
                                column, a.chunked.value);
  };
  if constexpr (Tile::kWhole) {
    load_tile<Tile::kThreads>(shared.own[0], key(0));
    load_tile<Tile::kThreads>(shared.own[1], value(0));
  } else {
    load_tile<Tile::kThreads>(shared.own_slice, key(slice));
  }
  ptx::cp_async_commit();
  Accumulators<Real, Tile::kFragments, kWarpColumns / 8> grad_key, grad_value;
  grad_key.clear();
  grad_value.clear();

  const TileRange seen_by = mask.queries_for(keys);
  const int first_row = seen_by.begin / Tile::kRows * Tile::kRows;
  const auto query = [&](int head, int row, int column) {
    return head_matrix<Element>(p.query, batch, head, sequence.q_begin + row, len_q - row, column,
                                a.chunked.query);
  };
  const auto grad_out = [&](int head, int row, int column) {
    return head_matrix<Element>(a.inputs.grad_out, batch, head, sequence.q_begin + row, len_q - row,
                                column, a.chunked.grad_out);
  };
  const auto load_rows = [&](int stage, int head, int row) {
    if constexpr (Tile::kWhole) {
      load_tile<Tile::kThreads>(shared.stream[stage][0], query(head, row, 0));
      load_tile<Tile::kThreads>(shared.stream[stage][1], grad_out(head, row, 0));
    } else {
      load_tile<Tile::kThreads>(shared.stream_slice[0], query(head, row, slice));
      load_tile<Tile::kThreads>(shared.stream_slice[1], grad_out(head, row, slice));
    }
    load_row_terms<Tile>(shared, stage, a, a.padded.begin(p, sequence, batch, head) + row);
    if constexpr (Terms::kMasked) {
      shared.bias[stage].template load<Tile::kThreads>(p.attn_mask, batch, head, row, keys.begin,
                                                       len_q - row, keys.size());
    }
    ptx::cp_async_commit();
  };

  int head = kv_head * group, row = first_row, stage = 0, parity = 0;
  const int heads_end = seen_by.empty() ? head : head + group;
  const auto summary_of = [&](int head, int row) {
    return a.mask_summary.of_tile<Tile::kRows, Tile::kKeys>(batch, head, row, keys.begin);
  };
  const auto go_on = [&](int& head, int& row) {
    row += Tile::kRows;
    if (row < seen_by.end) return;
    row = first_row;
    ++head;
  };
  // From rows to the first that attn_mask lets see any of the keys. Turns are taken by all.
  const auto skip_hidden = [&](int& head, int& row) {
    if constexpr (Terms::kGeneral || Terms::kMasked) {
      while (!a.deterministic && head < heads_end &&
             !(summary_of(head, row) & MaskSummary::kSomeVisible)) {
        go_on(head, row);
      }
    }
  };
  skip_hidden(head, row);
  if (head < heads_end) load_rows(0, head, row);
  fill_dropout<Tile, Terms>(shared, 0, p, batch, head, row, keys.begin);
#pragma unroll 1
  while (head < heads_end) {
    int next_head = head, next_row = row;
    go_on(next_head, next_row);
    skip_hidden(next_head, next_row);
    ptx::cp_async_wait<0>();
    if constexpr (Terms::kMasked) {
      shared.bias[stage].template interleave<Tile::kThreads>(p.attn_mask);
    }
    __syncthreads();  // the rows are here, and everybody is done with those before
    const auto load_next = [&] {
      if (Tile::kStages > 1 && next_head < heads_end) load_rows(stage ^ 1, next_head, next_row);
    };

    // Key tiles add to grad_query of these rows from the last that they see to the first.
    int* const turn = a.turns +
                      ((static_cast<int64_t>(batch) * p.heads_q + head) * a.slices.value() +
                       slice / Tile::kSlice) *
                          a.row_parts.value() +
                      row / Tile::kRows;
    const int my_turn =
        (mask.keys_for({row, min(row + Tile::kRows, len_q)}).end - 1) / Tile::kKeys - part;
    fill_general_terms<Tile, Terms>(shared, a, batch, head, row, keys.begin, len_q, len_k);
    const uint32_t tile_summary = Terms::kMasked || (Terms::kGeneral && a.deterministic)
                                      ? summary_of(head, row)
                                      : uint32_t{MaskSummary::kSomeVisible};
    const bool visible = tile_summary & MaskSummary::kSomeVisible;
    const auto decide_dropout = [&] {
      fill_dropout<Tile, Terms>(shared, parity ^ 1, p, batch, next_head, next_row, keys.begin);
    };
    // Half of the warps decide dropout of the next rows before the products, half after them: what
    // the ones compute hides behind what the others multiply.
    const bool decides_early = warp < Tile::kWarps / 2 || !visible;
    if (decides_early) decide_dropout();
    // So do they with the addresses of what they load, where no other block would fill the gap.
    constexpr bool kApart = Tile::kBlocksPerMultiprocessor == 1 && !Terms::kDropout;
    const bool loads_early = !kApart || warp < Tile::kWarps / 2 || !visible;
    if (loads_early) load_next();
    if (visible) {
      Accumulators<Real, Tile::kFragments, Tile::kWarpRows / 8> dots, grads;
      product<Tile>(
          dots, shared, stage, 0, static_cast<int>(p.head_dim), key,
          [&](int column) { return query(head, row, column); }, warp_key, warp_row, lane);
      if (!loads_early) load_next();
      product<Tile>(
          grads, shared, stage, 1, static_cast<int>(p.head_dim_v), value,
          [&](int column) { return grad_out(head, row, column); }, warp_key, warp_row, lane);
      if (!decides_early) decide_dropout();
      const bool hidden_pairs =
          !mask.all_visible({row, row + Tile::kRows}, {keys.begin, keys.begin + Tile::kKeys});
      const Terms terms(p, batch, head, mask);
      gradient_step<Tile, GradientOf::dot_product>(a, terms, shared, stage, parity, tile_summary,
                                                   keys.begin, row, warp_key, warp_row,
                                                   hidden_pairs, dots, grads, lane);
      if constexpr ((Terms::kGeneral || Terms::kMasked) && Tile::kWhole) {
        if (a.mask_gradient != MaskGradient::elsewhere) {
          const KeyPosition at{keys.begin + warp_key + lane / 4, row + warp_row + 2 * (lane % 4)};
          write_mask_gradient(a, batch, head, at, len_q, len_k, grads);
        }
      }

      const auto& query_tile = [&]() -> const auto& {
        if constexpr (Tile::kWhole)
          return shared.stream[stage][0];
        else
          return shared.stream_slice[0];
      }();
      const auto& grad_out_tile = [&]() -> const auto& {
        if constexpr (Tile::kWhole)
          return shared.stream[stage][1];
        else
          return shared.stream_slice[1];
      }();
      const auto& key_tile = [&]() -> const auto& {
        if constexpr (Tile::kWhole)
          return shared.own[0];
        else
          return shared.own_slice;
      }();
      const int column = column_warp * kWarpColumns;
      Arithmetic::store(grads, shared.score_gradients, warp_key, warp_row, lane);
      if constexpr (Tile::kColumnWarps == 1) {
        Arithmetic::multiply_accumulators(grad_value, dots, grad_out_tile, shared.probabilities,
                                          lane);
        Arithmetic::multiply_accumulators(grad_key, grads, query_tile, shared.probabilities, lane);
      } else {
        Arithmetic::store(dots, shared.probabilities, warp_key, warp_row, lane);
      }
      __syncthreads();  // the score gradients of all keys are here
      if constexpr (Tile::kColumnWarps > 1) {
        Arithmetic::multiply(grad_value, shared.probabilities, warp_key, grad_out_tile, column,
                             lane);
        Arithmetic::multiply(grad_key, shared.score_gradients, warp_key, query_tile, column, lane);
      }

      // grad_query of these rows: the warps share its rows and columns anew.
      constexpr int kColumnsOfQuery = Tile::kSlice / (Tile::kWarps / Tile::kQueryWarps);
      constexpr int kQueryFragments = Tile::kRows / (16 * Tile::kQueryWarps);
      const int query_row = warp % Tile::kQueryWarps * 16 * kQueryFragments;
      const int query_column = warp / Tile::kQueryWarps * kColumnsOfQuery;
      Accumulators<Real, kQueryFragments, kColumnsOfQuery / 8> grad_query;
      grad_query.clear();
      Arithmetic::transposed_multiply(grad_query, shared.score_gradients, query_row, key_tile,
                                      query_column, lane);
      if (a.deterministic) wait_for(turn, my_turn);
      Real* const sums =
          static_cast<Real*>(a.grad_query) +
          (a.padded.begin(p, sequence, batch, head) + row) * a.slices.value() * Tile::kSlice +
          Tile::kRows * slice;
#pragma unroll
      for (int f = 0; f < kQueryFragments; ++f) {
#pragma unroll
        for (int b = 0; b < kColumnsOfQuery / 8; ++b) {
          const int fragment = (query_row / 16 + f) * (Tile::kSlice / 8) + query_column / 8 + b;
          ptx::add_to_global(sums + (fragment * 32 + lane) * 4, grad_query.value[f][b]);
        }
      }
    } else if (a.deterministic) {
      wait_for(turn, my_turn);
    }
    if (a.deterministic) {
      __syncthreads();  // everybody has added
      if (threadIdx.x == 0) ptx::release(turn, my_turn + 1);
    }
    if (Tile::kStages == 1 && next_head < heads_end) {
      __syncthreads();  // everybody is done with these rows
      load_rows(0, next_head, next_row);
    }
    head = next_head;
    row = next_row;
    if (Tile::kStages > 1) stage ^= 1;
    parity ^= 1;
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // the tiles are free to be staging room
  grad_key.multiply(static_cast<Real>(p.scale));
  if (Terms::kDropout) grad_value.multiply(static_cast<Real>(p.dropout.keep_scale()));
  const int column = column_warp * kWarpColumns;
  const auto store = [&](const auto& sums, auto& staging, const UntypedView4& view) {
    if (!view) return;
    const auto to = view.as<Element>();
    store_rows<Arithmetic>(
        sums, staging, warp_key, column,
        {to.at(batch, kv_head, sequence.k_begin + keys.begin, slice + column), to.stride[2],
         to.stride[3], min(stored_keys - keys.begin, Tile::kKeys),
         static_cast<int>(view.size[3]) - slice - column,
         &view == &a.outputs.grad_key ? a.chunked.grad_key : a.chunked.grad_value},
        lane);
  };
  store(grad_key, shared.own[0], a.outputs.grad_key);
  store(grad_value, shared.own[1], a.outputs.grad_value);
}

}  // namespace flashattn::cuda::portable
