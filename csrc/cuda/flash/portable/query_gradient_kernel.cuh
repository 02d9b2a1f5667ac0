// grad_query of flash attention: a block owns query rows and walks over the keys that they see.
#pragma once

#include "cuda/flash/portable/forward_kernel.cuh"
#include "cuda/flash/portable/gradient_tiles.cuh"
#include "cuda/flash/portable/row_terms_kernel.cuh"

namespace flashattn::cuda::portable {

// Blocks: (batch, heads_q, slices of head_dim, row tiles), slowest first.
template <class Tile, class Terms>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    flash_query_gradient_kernel(const __grid_constant__ BackwardArguments a, int slices) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<GradientShared<Tile>*>(shared_bytes);
  const AttentionProblem& p = a.problem;

  int64_t block = blockIdx.x;
  const int64_t part = a.row_parts - 1 - block % a.row_parts;
  block /= a.row_parts;
  const int slice = static_cast<int>(block % slices) * Tile::kSlice;
  block /= slices;
  const int64_t head = block % p.heads_q, batch = block / p.heads_q;
  const int64_t kv_head = p.kv_head(head);
  const Sequence sequence = p.sequences[batch];
  const SequenceMask mask = p.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
  const Range rows{part * Tile::kOwn, min((part + 1) * Tile::kOwn, sequence.len_q)};
  Real* const partial_alibi =
      a.partial_alibi && slice == 0
          ? static_cast<Real*>(a.partial_alibi) + (batch * p.heads_q + head) * a.row_parts + part
          : nullptr;
  if (rows.empty()) {
    if (partial_alibi && threadIdx.x == 0) *partial_alibi = 0;
    return;
  }

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * Tile::kFragments;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.head_dim_v);
  const auto query = [&](int column) {
    return head_matrix<Element>(p.query, batch, head, sequence.q_begin + rows.begin, rows.size(),
                                column, head_dim, a.chunked_query);
  };
  const auto grad_out = [&](int column) {
    return head_matrix<Element>(a.inputs.grad_out, batch, head, sequence.q_begin + rows.begin,
                                rows.size(), column, value_dim, a.chunked_grad_out);
  };
  if constexpr (Tile::kWhole) {
    load_tile<Tile::kThreads>(shared.own[0], query(0));
    load_tile<Tile::kThreads>(shared.own[1], grad_out(0));
  }

  RowTerms<Real> row_terms[Tile::kFragments][2];
#pragma unroll
  for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = rows.begin + warp_row + 16 * f + 8 * half + lane / 4;
      row_terms[f][half] = row < rows.end
                               ? RowTerms<Real>::load(a, batch, head, sequence.q_begin + row)
                               : RowTerms<Real>::none();
    }
  }
  const Terms terms(p, batch, head, mask);
  const DropoutStream stream =
      p.dropout ? p.dropout.stream(batch, p.heads_q, head) : DropoutStream{};
  Accumulators<Real, Tile::kFragments, Tile::kSlice / 8> grad_query;
  grad_query.clear();
  Real grad_alibi = 0;

  const Tiles tiles = aligned_tiles(mask.keys_for(rows), Tile::kStream);
  for (int64_t t = 0; t < tiles.count(); ++t) {
    const Range keys = tiles[t];
    const auto key = [&](int column) {
      return head_matrix<Element>(p.key, batch, kv_head, sequence.k_begin + keys.begin, keys.size(),
                                  column, head_dim, a.chunked_key);
    };
    const auto value = [&](int column) {
      return head_matrix<Element>(p.value, batch, kv_head, sequence.k_begin + keys.begin,
                                  keys.size(), column, value_dim, a.chunked_value);
    };
    __syncthreads();  // everybody is done with the tiles before
    if constexpr (Tile::kWhole) {
      load_tile<Tile::kThreads>(shared.stream[0], key(0));
      load_tile<Tile::kThreads>(shared.stream[1], value(0));
    } else {
      load_tile<Tile::kThreads>(shared.slice[0], key(slice));
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();

    Accumulators<Real, Tile::kFragments, Tile::kStream / 8> dots, grads;
    product<Tile>(dots, shared, 0, head_dim, query, key, warp_row, lane);
    product<Tile>(grads, shared, 1, value_dim, grad_out, value, warp_row, lane);
    const bool hidden_pairs = !mask.all_visible({rows.begin, rows.begin + Tile::kOwn},
                                                {keys.begin, keys.begin + Tile::kStream});
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
      const RowPosition at{rows.begin + warp_row + 16 * f + lane / 4, keys.begin + 2 * (lane % 4)};
      gradient_step(
          p, terms, stream, at, mask, hidden_pairs, dots.value[f], grads.value[f],
          [&](int, int e) { return row_terms[f][e / 2]; },
          [&](int b, int e, Real grad) {
            if (Terms::kGeneral && partial_alibi) {
              grad_alibi +=
                  grad * alibi_distance<Real>(at.row_of(b, e), mask.shift, at.key_of(b, e));
            }
          });
    }
    if constexpr (Tile::kWhole) {
      Arithmetic::multiply_accumulators(grad_query, grads, shared.stream[0], shared.scratch, lane);
    } else {
      Arithmetic::multiply_accumulators(grad_query, grads, shared.slice[0], shared.scratch, lane);
    }
  }

  if (a.outputs.grad_query) {
    const auto out = a.outputs.grad_query.as<Element>();
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = rows.begin + warp_row + 16 * f + 8 * half + lane / 4;
        if (row >= rows.end) continue;
        store_row<Rounding::kept>(grad_query.value[f], half, Real(1),
                                  out.at(batch, head, sequence.q_begin + row, slice), out.stride[3],
                                  head_dim - slice, false, lane);
      }
    }
  }
  if (Terms::kGeneral && partial_alibi) {
    const Real sum = block_sum<Tile::kWarps>(grad_alibi, shared.lse);
    if (threadIdx.x == 0) *partial_alibi = sum;
  }
}

}  // namespace flashattn::cuda::portable
