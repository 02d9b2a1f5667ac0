// Sums of score gradients in the shape of what was broadcast over the scores: the gradient of a
// float attn_mask, and that of alibi_slopes, where each pair counts with its distance. A block owns
// a tile of that shape and visits every pair that was broadcast from it, so that nothing of size
// len_q * len_k is stored but the result.
#pragma once

#include "cuda/flash/portable/tiles.cuh"

namespace flashattn::cuda::portable {

struct ScoreSums {
  UntypedView4 to;  // (batch | 1, heads_q | 1, len_q | 1, len_k | 1), accumulator type
  bool by_distance;
  int row_parts, key_parts;  // tiles of `to`; a broadcast dimension has one
};

// Small tiles on every GPU: nothing is loaded ahead, so several blocks hide each other's waits.
template <class Arithmetic, int HeadDim>
using ScoreSumsTile = BackwardTiles<Arithmetic, HeadDim, ScoreKind::general, Room::small>;

// Blocks: (batch, heads, row tiles, key tiles) of the result, slowest first.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    flash_score_sums_kernel(const __grid_constant__ BackwardArguments a,
                            const __grid_constant__ ScoreSums sums) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Tile::Element;
  using Real = typename Tile::Real;
  using Terms = GeneralScores<Real>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Tile, Terms>*>(shared_bytes);
  const AttentionProblem& p = a.problem;
  const auto to = sums.to.as<Real>();

  int block = blockIdx.x;
  const int key_part = block % sums.key_parts;
  block /= sums.key_parts;
  const int row_part = block % sums.row_parts;
  block /= sums.row_parts;
  const int to_head = block % static_cast<int>(to.size[1]);
  const int to_batch = block / static_cast<int>(to.size[1]);
  // Where a dimension was broadcast, a block covers all of it; else one index or tile.
  const auto covered = [&](int dim, int index, int length, int tile) {
    return to.size[dim] == 1 ? TileRange{0, length}
                             : TileRange{index * tile, min((index + 1) * tile, length)};
  };
  const TileRange batches = covered(0, to_batch, static_cast<int>(p.sequences.count), 1);
  const TileRange heads = covered(1, to_head, static_cast<int>(p.heads_q), 1);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_key = warp % Tile::kKeyWarps * 16 * Tile::kFragments;
  const int warp_row = warp / Tile::kKeyWarps * Tile::kWarpRows;
  Accumulators<Real, Tile::kFragments, Tile::kWarpRows / 8> sum;
  sum.clear();

  const auto add_tile = [&](int batch, int head, const Sequence& sequence, const TileMask& mask,
                            int row, int key) {
    const int kv_head = static_cast<int>(p.kv_head(head));
    const auto matrix = [&](const UntypedView4& view, int of_head, int64_t first, int rows,
                            bool chunked) {
      return [=, &view](int column) {
        return head_matrix<Element>(view, batch, of_head, first, rows, column, chunked);
      };
    };
    const auto query =
        matrix(p.query, head, sequence.q_begin + row, mask.len_q - row, a.chunked.query);
    const auto grad_out = matrix(a.inputs.grad_out, head, sequence.q_begin + row, mask.len_q - row,
                                 a.chunked.grad_out);
    const auto keys =
        matrix(p.key, kv_head, sequence.k_begin + key, mask.len_k - key, a.chunked.key);
    const auto values =
        matrix(p.value, kv_head, sequence.k_begin + key, mask.len_k - key, a.chunked.value);
    const uint32_t tile_summary =
        a.mask_summary.of_tile<Tile::kRows, Tile::kKeys>(batch, head, row, key);
    if (!(tile_summary & MaskSummary::kSomeVisible)) return;
    __syncthreads();  // everybody is done with the tile before
    if (threadIdx.x == 0) shared.mask = mask;
    load_row_terms<Tile>(shared, 0, a, a.padded.begin(p, sequence, batch, head) + row);
    fill_dropout<Tile, Terms>(shared, 0, p, batch, head, row, key);
    if constexpr (Tile::kWhole) {
      load_tile<Tile::kThreads>(shared.own[0], keys(0));
      load_tile<Tile::kThreads>(shared.own[1], values(0));
      load_tile<Tile::kThreads>(shared.stream[0][0], query(0));
      load_tile<Tile::kThreads>(shared.stream[0][1], grad_out(0));
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    fill_general_terms<Tile, Terms>(shared, a, batch, head, row, key, mask.len_q, mask.len_k);
    Accumulators<Real, Tile::kFragments, Tile::kWarpRows / 8> dots, grads;
    product<Tile>(dots, shared, 0, 0, static_cast<int>(p.head_dim), keys, query, warp_key, warp_row,
                  lane);
    product<Tile>(grads, shared, 0, 1, static_cast<int>(p.head_dim_v), values, grad_out, warp_key,
                  warp_row, lane);
    const Terms terms(p, batch, head, mask);
    gradient_step<Tile, GradientOf::score>(a, terms, shared, 0, 0, tile_summary, key, row, warp_key,
                                           warp_row, true, dots, grads, lane);
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
      const KeyPosition at{key + warp_key + 16 * f + lane / 4, row + warp_row + 2 * (lane % 4)};
#pragma unroll
      for (int b = 0; b < Tile::kWarpRows / 8; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Real weight =
              sums.by_distance ? alibi_distance<Real>(at.row_of(b, e), mask.shift, at.key_of(b, e))
                               : Real(1);
          sum.value[f][b][e] += grads.value[f][b][e] * weight;
        }
      }
    }
  };

  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence sequence = p.sequences[batch];
    const int len_q = static_cast<int>(sequence.len_q), len_k = static_cast<int>(sequence.len_k);
    const TileMask mask = p.mask_rule.for_sequence<int>(len_q, len_k);
    const TileRange rows = covered(2, row_part, len_q, Tile::kRows);
    const TileRange keys = covered(3, key_part, len_k, Tile::kKeys);
    for (int head = heads.begin; head < heads.end; ++head) {
      for (int row = rows.begin; row < rows.end; row += Tile::kRows) {
        const TileRange seen = mask.keys_for({row, min(row + Tile::kRows, rows.end)});
        const int first = max(keys.begin, seen.begin) / Tile::kKeys * Tile::kKeys;
#pragma unroll 1
        for (int key = first; key < min(keys.end, seen.end); key += Tile::kKeys) {
          add_tile(batch, head, sequence, mask, row, key);
        }
      }
    }
  }

  // To the result's shape, in order: sums over rows, over keys, or both, of the tile.
  ptx::cp_async_wait<0>();
  __syncthreads();
  auto& tile = *reinterpret_cast<SharedTile<Real, Tile::kKeys, Tile::kRows>*>(shared_bytes);
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int b = 0; b < Tile::kWarpRows / 8; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        *tile.at(warp_key + 16 * f + 8 * (e / 2) + lane / 4,
                 warp_row + 8 * b + 2 * (lane % 4) + e % 2) = sum.value[f][b][e];
      }
    }
  }
  __syncthreads();
  const bool sum_rows = to.size[2] == 1, sum_keys = to.size[3] == 1;
  const int first_row = sum_rows ? 0 : row_part * Tile::kRows;
  const int first_key = sum_keys ? 0 : key_part * Tile::kKeys;
  const int rows = sum_rows ? 1 : min(Tile::kRows, static_cast<int>(to.size[2]) - first_row);
  const int keys = sum_keys ? 1 : min(Tile::kKeys, static_cast<int>(to.size[3]) - first_key);
  for (int i = threadIdx.x; i < rows * keys; i += Tile::kThreads) {
    const int row = i / keys, key = i % keys;
    Real total = 0;
    for (int r = row; r < (sum_rows ? Tile::kRows : row + 1); ++r) {
      for (int k = key; k < (sum_keys ? Tile::kKeys : key + 1); ++k) total += *tile.at(k, r);
    }
    *to.at(to_batch, to_head, first_row + row, first_key + key) = total;
  }
}

}  // namespace flashattn::cuda::portable
