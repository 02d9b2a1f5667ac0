// The gradient of a float attn_mask: a block owns a tile of the mask's own shape and visits every
// pair that was broadcast from it, so that nothing of size len_q * len_k is stored but the result.
#pragma once

#include "cuda/flash/portable/gradient_tiles.cuh"

namespace flashattn::cuda::portable {

// Blocks: (mask batch, mask heads, row tiles, key tiles); a broadcast dimension has one tile.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    flash_mask_gradient_kernel(const __grid_constant__ BackwardArguments a, int64_t row_parts,
                               int64_t key_parts) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  using Terms = GeneralScores<Real>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<GradientShared<Tile>*>(shared_bytes);
  const AttentionProblem& p = a.problem;
  const auto grad_mask = a.outputs.grad_mask.template as<Real>();

  int64_t block = blockIdx.x;
  const int64_t key_part = block % key_parts;
  block /= key_parts;
  const int64_t row_part = block % row_parts;
  block /= row_parts;
  // Where dimension d of the mask was broadcast, a block covers all of it; else one index or tile.
  const auto covered = [&](int d, int64_t index, int64_t length, int64_t tile) {
    return grad_mask.size[d] == 1 ? Range{0, length}
                                  : Range{index * tile, min((index + 1) * tile, length)};
  };
  const int64_t mask_head = block % grad_mask.size[1], mask_batch = block / grad_mask.size[1];
  const Range batches = covered(0, mask_batch, p.sequences.count, 1);
  const Range heads = covered(1, mask_head, p.heads_q, 1);
  const Range all_rows = covered(2, row_part, p.sequences.storage_q, Tile::kOwn);
  const Range all_keys = covered(3, key_part, p.sequences.storage_k, Tile::kStream);

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * Tile::kFragments;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.head_dim_v);
  Accumulators<Real, Tile::kFragments, Tile::kStream / 8> sum;
  sum.clear();

  for (int64_t pair = batches.begin * p.heads_q; pair < batches.end * p.heads_q; ++pair) {
    const int64_t batch = pair / p.heads_q, head = pair % p.heads_q;
    if (head < heads.begin || head >= heads.end) continue;
    const int64_t kv_head = p.kv_head(head);
    const Sequence sequence = p.sequences[batch];
    const SequenceMask mask = p.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const Terms terms(p, batch, head, mask);
    const DropoutStream stream =
        p.dropout ? p.dropout.stream(batch, p.heads_q, head) : DropoutStream{};
    for (int64_t row = all_rows.begin; row < all_rows.end; row += Tile::kOwn) {
      const Range rows{row, min(row + Tile::kOwn, all_rows.end)};
      const Range seen = mask.keys_for(rows);
      const Range wanted{max(all_keys.begin, seen.begin), min(all_keys.end, seen.end)};
      const Tiles tiles = aligned_tiles(wanted, Tile::kStream);
      RowTerms<Real> row_terms[Tile::kFragments][2];
#pragma unroll
      for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t i = rows.begin + warp_row + 16 * f + 8 * half + lane / 4;
          row_terms[f][half] =
              i < rows.end ? RowTerms<Real>::load(a, batch, head, i) : RowTerms<Real>::none();
        }
      }
      for (int64_t t = 0; t < tiles.count(); ++t) {
        const Range keys = tiles[t];
        const auto query = [&](int column) {
          return head_matrix<Element>(p.query, batch, head, rows.begin, rows.size(), column,
                                      head_dim, a.chunked_query);
        };
        const auto grad_out = [&](int column) {
          return head_matrix<Element>(a.inputs.grad_out, batch, head, rows.begin, rows.size(),
                                      column, value_dim, a.chunked_grad_out);
        };
        const auto key = [&](int column) {
          return head_matrix<Element>(p.key, batch, kv_head, keys.begin, keys.size(), column,
                                      head_dim, a.chunked_key);
        };
        const auto value = [&](int column) {
          return head_matrix<Element>(p.value, batch, kv_head, keys.begin, keys.size(), column,
                                      value_dim, a.chunked_value);
        };
        if constexpr (Tile::kWhole) {
          __syncthreads();
          load_tile<Tile::kThreads>(shared.own[0], query(0));
          load_tile<Tile::kThreads>(shared.own[1], grad_out(0));
          load_tile<Tile::kThreads>(shared.stream[0], key(0));
          load_tile<Tile::kThreads>(shared.stream[1], value(0));
          ptx::cp_async_commit();
          ptx::cp_async_wait<0>();
          __syncthreads();
        }
        Accumulators<Real, Tile::kFragments, Tile::kStream / 8> dots, grads;
        product<Tile>(dots, shared, 0, head_dim, query, key, warp_row, lane);
        product<Tile>(grads, shared, 1, value_dim, grad_out, value, warp_row, lane);
#pragma unroll
        for (int f = 0; f < Tile::kFragments; ++f) {
          const RowPosition at{rows.begin + warp_row + 16 * f + lane / 4,
                               keys.begin + 2 * (lane % 4)};
          gradient_step(
              p, terms, stream, at, mask, true, dots.value[f], grads.value[f],
              [&](int, int e) { return row_terms[f][e / 2]; },
              [&](int b, int e, Real grad) { sum.value[f][b][e] += grad; });
        }
      }
    }
  }

  // To the mask's shape, in order: sums over rows, over keys, or both, of the tile.
  __syncthreads();
  auto& tile = *reinterpret_cast<SharedTile<Real, Tile::kOwn, Tile::kStream>*>(shared_bytes);
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int b = 0; b < Tile::kStream / 8; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        *tile.at(warp_row + 16 * f + 8 * (e / 2) + lane / 4, 8 * b + 2 * (lane % 4) + e % 2) =
            sum.value[f][b][e];
      }
    }
  }
  __syncthreads();
  const bool sum_rows = grad_mask.size[2] == 1, sum_keys = grad_mask.size[3] == 1;
  const int rows = sum_rows ? 1 : static_cast<int>(all_rows.size());
  const int keys = sum_keys ? 1 : static_cast<int>(all_keys.size());
  for (int i = threadIdx.x; i < rows * keys; i += Tile::kThreads) {
    const int row = i / keys, key = i % keys;
    Real total = 0;
    for (int r = row; r < (sum_rows ? Tile::kOwn : row + 1); ++r) {
      for (int k = key; k < (sum_keys ? Tile::kStream : key + 1); ++k) total += *tile.at(r, k);
    }
    *grad_mask.at(mask_batch, mask_head, sum_rows ? 0 : all_rows.begin + row,
                  sum_keys ? 0 : all_keys.begin + key) = total;
  }
}

}  // namespace flashattn::cuda::portable
