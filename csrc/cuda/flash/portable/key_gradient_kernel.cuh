// grad_key and grad_value of flash attention: a block owns keys and walks over the query rows, of
// every head of the group, that see them.
#pragma once

#include "cuda/flash/portable/forward_kernel.cuh"
#include "cuda/flash/portable/gradient_tiles.cuh"

namespace flashattn::cuda::portable {

// Blocks: (batch, heads_kv, slices of the head dims, key tiles), slowest first.
template <class Tile, class Terms>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    flash_key_gradient_kernel(const __grid_constant__ BackwardArguments a, int slices,
                              int64_t key_parts) {
  using Arithmetic = typename Tile::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Real = typename Arithmetic::Real;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<GradientShared<Tile>*>(shared_bytes);
  const AttentionProblem& p = a.problem;

  int64_t block = blockIdx.x;
  const int64_t part = block % key_parts;  // early keys are seen by most rows under a causal mask
  block /= key_parts;
  const int slice = static_cast<int>(block % slices) * Tile::kSlice;
  block /= slices;
  const int64_t kv_head = block % p.heads_kv, batch = block / p.heads_kv;
  const Sequence sequence = p.sequences[batch];
  const SequenceMask mask = p.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
  const Range keys{part * Tile::kOwn, min((part + 1) * Tile::kOwn, sequence.len_k)};
  if (keys.empty()) return;

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * Tile::kFragments;
  const int head_dim = static_cast<int>(p.head_dim), value_dim = static_cast<int>(p.head_dim_v);
  const auto key = [&](int column) {
    return head_matrix<Element>(p.key, batch, kv_head, sequence.k_begin + keys.begin, keys.size(),
                                column, head_dim, a.chunked_key);
  };
  const auto value = [&](int column) {
    return head_matrix<Element>(p.value, batch, kv_head, sequence.k_begin + keys.begin, keys.size(),
                                column, value_dim, a.chunked_value);
  };
  if constexpr (Tile::kWhole) {
    load_tile<Tile::kThreads>(shared.own[0], key(0));
    load_tile<Tile::kThreads>(shared.own[1], value(0));
  }
  Accumulators<Real, Tile::kFragments, Tile::kSlice / 8> grad_key, grad_value;
  grad_key.clear();
  grad_value.clear();

  const Tiles tiles = aligned_tiles(mask.queries_for(keys), Tile::kStream);
  const int64_t first_head = kv_head * p.group_size();
  for (int64_t step = 0; step < tiles.count() * p.group_size(); ++step) {
    const int64_t head = first_head + step / tiles.count();
    const Range rows = tiles[step % tiles.count()];
    const auto query = [&](int column) {
      return head_matrix<Element>(p.query, batch, head, sequence.q_begin + rows.begin, rows.size(),
                                  column, head_dim, a.chunked_query);
    };
    const auto grad_out = [&](int column) {
      return head_matrix<Element>(a.inputs.grad_out, batch, head, sequence.q_begin + rows.begin,
                                  rows.size(), column, value_dim, a.chunked_grad_out);
    };
    __syncthreads();  // everybody is done with the tiles before
    if constexpr (Tile::kWhole) {
      load_tile<Tile::kThreads>(shared.stream[0], query(0));
      load_tile<Tile::kThreads>(shared.stream[1], grad_out(0));
    } else {
      load_tile<Tile::kThreads>(shared.slice[0], query(slice));
      load_tile<Tile::kThreads>(shared.slice[1], grad_out(slice));
    }
    ptx::cp_async_commit();
    for (int i = threadIdx.x; i < Tile::kStream; i += Tile::kThreads) {
      const RowTerms<Real> row =
          i < rows.size() ? RowTerms<Real>::load(a, batch, head, sequence.q_begin + rows.begin + i)
                          : RowTerms<Real>::none();
      shared.lse[i] = row.lse;
      shared.lse_low[i] = row.lse_low;
      shared.deltas[i] = row.delta;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();

    Accumulators<Real, Tile::kFragments, Tile::kStream / 8> dots, grads;
    product<Tile>(dots, shared, 0, head_dim, key, query, warp_row, lane);
    product<Tile>(grads, shared, 1, value_dim, value, grad_out, warp_row, lane);
    const bool hidden_pairs = !mask.all_visible({rows.begin, rows.begin + Tile::kStream},
                                                {keys.begin, keys.begin + Tile::kOwn});
    const Terms terms(p, batch, head, mask);
    const DropoutStream stream =
        p.dropout ? p.dropout.stream(batch, p.heads_q, head) : DropoutStream{};
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
      const KeyPosition at{keys.begin + warp_row + 16 * f + lane / 4, rows.begin + 2 * (lane % 4)};
      gradient_step(
          p, terms, stream, at, mask, hidden_pairs, dots.value[f], grads.value[f],
          [&](int b, int e) {
            const int i = 8 * b + 2 * (lane % 4) + e % 2;
            return RowTerms<Real>{shared.lse[i], shared.lse_low[i], shared.deltas[i]};
          },
          [](int, int, Real) {});
    }
    if constexpr (Tile::kWhole) {
      Arithmetic::multiply_accumulators(grad_value, dots, shared.stream[1], shared.scratch, lane);
      Arithmetic::multiply_accumulators(grad_key, grads, shared.stream[0], shared.scratch, lane);
    } else {
      Arithmetic::multiply_accumulators(grad_value, dots, shared.slice[1], shared.scratch, lane);
      Arithmetic::multiply_accumulators(grad_key, grads, shared.slice[0], shared.scratch, lane);
    }
  }

  const auto store = [&](const auto& sum, const UntypedView4& view, int columns) {
    if (!view) return;
    const auto out = view.as<Element>();
#pragma unroll
    for (int f = 0; f < Tile::kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = keys.begin + warp_row + 16 * f + 8 * half + lane / 4;
        if (row >= keys.end) continue;
        store_row<Rounding::kept>(sum.value[f], half, Real(1),
                                  out.at(batch, kv_head, sequence.k_begin + row, slice),
                                  out.stride[3], columns - slice, false, lane);
      }
    }
  };
  store(grad_key, a.outputs.grad_key, head_dim);
  store(grad_value, a.outputs.grad_value, value_dim);
}

}  // namespace flashattn::cuda::portable
