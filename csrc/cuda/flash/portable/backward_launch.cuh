// From a backward problem to the kernels of the portable family.
#pragma once

#include "cuda/flash/portable/backward_kernel.cuh"
#include "cuda/flash/portable/forward_launch.cuh"
#include "cuda/flash/portable/row_kernels.cuh"
#include "cuda/flash/portable/score_sums_kernel.cuh"

namespace flashattn::cuda::portable {

template <class Element, class Terms>
void launch_row_terms(const OpScope& scope, BackwardArguments a) {
  const AttentionProblem& p = a.problem;
  using Real = Accumulator<Element>;
  const int64_t parts = divide_up(p.sequences.max_len_q, kPaddedRows);
  const int64_t blocks = p.sequences.count * p.heads_q * parts;
  a.row_parts = Divisor(parts);
  a.heads = Divisor(p.heads_q);
  if (blocks > 0) {
    launch(scope, {blocks, 32 * kRowTermWarps}, flash_row_terms_kernel<Element, Terms>, a);
  }
  if (a.partial_sinks && p.heads_q > 0) {
    constexpr int kThreads = 64;
    launch(scope, {divide_up(p.heads_q, kThreads), kThreads}, flash_add_sinks_kernel<Real>,
           static_cast<const Real*>(a.partial_sinks), a.outputs.grad_sinks,
           static_cast<int>(p.sequences.count), static_cast<int>(p.heads_q),
           static_cast<int>(parts));
  }
}

template <class Tiles, class Terms>
void launch_gradients(const OpScope& scope, BackwardArguments a, const Workspace& workspace) {
  const AttentionProblem& p = a.problem;
  with_device_tile<Tiles>(scope, flash_backward_kernel<Tiles, Terms>, [&](auto tile) {
    using Tile = decltype(tile);
    using Real = typename Tile::Real;
    const int64_t row_parts = divide_up(p.sequences.max_len_q, Tile::kRows);
    const int64_t row_blocks = p.sequences.count * p.heads_q * row_parts;
    a.row_parts = Divisor(row_parts);
    a.heads = Divisor(p.heads_q);
    a.heads_kv = Divisor(p.heads_kv);
    a.group = Divisor(p.group_size());
    a.slices = Divisor(divide_up(std::max(p.head_dim, p.head_dim_v), Tile::kSlice));
    const int64_t slices = a.slices.value();
    const int64_t sums = a.padded.count(p) * slices * Tile::kSlice * int64_t{sizeof(Real)};
    const int64_t turns = a.deterministic ? row_blocks * slices * int64_t{4} : 0;
    char* const memory = static_cast<char*>(workspace(sums + turns));
    a.grad_query = memory;
    a.turns = reinterpret_cast<int*>(memory + sums);
    FLASHATTN_CUDA_CHECK(scope.op(), cudaMemsetAsync(memory, 0, sums + turns, scope.stream()));

    const int64_t parts = tiles_of_keys(p.sequences, Tile::kKeys);
    const int64_t heads = batches_of(p.sequences) * p.heads_kv * slices;
    if (parts * heads > 0) {
      a.order = order_of<Tile>(scope, p, parts, heads);
      launch(scope, {a.order.blocks(), Tile::kThreads, sizeof(BackwardShared<Tile, Terms>)},
             flash_backward_kernel<Tiles, Terms>, a);
    }
    if (row_blocks > 0 && a.outputs.grad_query) {
      launch(scope, {row_blocks, 256}, flash_query_gradient_kernel<Tiles>, a);
    }
  });
}

template <class Tile>
void launch_score_sums(const OpScope& scope, const BackwardArguments& a, const UntypedView4& to,
                       bool by_distance) {
  if (!to) return;
  using Terms = GeneralScores<typename Tile::Real>;
  const ScoreSums sums{to, by_distance, static_cast<int>(divide_up(to.size[2], Tile::kRows)),
                       static_cast<int>(divide_up(to.size[3], Tile::kKeys))};
  const int64_t blocks = to.size[0] * to.size[1] * sums.row_parts * sums.key_parts;
  if (blocks == 0) return;
  launch(scope, {blocks, Tile::kThreads, sizeof(BackwardShared<Tile, Terms>)},
         flash_score_sums_kernel<Tile>, a, sums);
}

// The backward kernel can write the gradient of a mask that has all rows and keys, where a block
// has all columns. Where the mask is broadcast over batch or heads, it adds in any order.
template <class Tile>
MaskGradient mask_gradient_of(const BackwardArguments& a) {
  const AttentionProblem& p = a.problem;
  const UntypedView4& to = a.outputs.grad_mask;
  if (!to || p.softcap > 0 || !Tile::kWhole) return MaskGradient::elsewhere;
  const bool all_pairs = to.size[2] == p.sequences.storage_q && to.size[3] == p.sequences.storage_k;
  const bool all_heads = to.size[0] == p.sequences.count && to.size[1] == p.heads_q;
  if (!all_pairs || (a.deterministic && !all_heads)) return MaskGradient::elsewhere;
  return all_heads ? MaskGradient::stored : MaskGradient::added;
}

// Where other terms are added to the scores, these may have gradients too.
template <class Arithmetic, int HeadDim, class Terms>
void launch_all_gradients(const OpScope& scope, BackwardArguments a, const Workspace& workspace) {
  const BackwardOutputs& out = a.outputs;
  a.mask_gradient = mask_gradient_of<ScoreSumsTile<Arithmetic, HeadDim>>(a);
  const bool with_mask = a.mask_gradient != MaskGradient::elsewhere;
  if (out.grad_query || out.grad_key || out.grad_value || with_mask) {
    launch_gradients<BackwardTilesOf<Arithmetic, HeadDim, ScoreKind::general>, Terms>(scope, a,
                                                                                      workspace);
  }
  if (!with_mask) {
    launch_score_sums<ScoreSumsTile<Arithmetic, HeadDim>>(scope, a, out.grad_mask, false);
  }
  launch_score_sums<ScoreSumsTile<Arithmetic, HeadDim>>(scope, a, out.grad_alibi, true);
}

template <class Element>
void launch_backward(const OpScope& scope, const BackwardArguments& a, const Workspace& workspace) {
  const AttentionProblem& p = a.problem;
  const auto general = [&](auto arithmetic, auto... widths) {
    using Arithmetic = decltype(arithmetic);
    launch_row_terms<Element, GeneralScores<typename Arithmetic::Real>>(scope, a);
    with_width(
        p,
        [&](auto width) {
          launch_all_gradients<Arithmetic, width.value, GeneralScores<typename Arithmetic::Real>>(
              scope, a, workspace);
        },
        widths...);
  };
  if constexpr (sizeof(Element) == 2) {
    using Arithmetic = TensorCores<Element>;
    if (has_plain_scores(p) && std::max(p.head_dim, p.head_dim_v) <= 256) {
      launch_row_terms<Element, PlainScores>(scope, a);
      return with_width(
          p,
          [&](auto width) {
            if (p.dropout) {
              launch_gradients<BackwardTilesOf<Arithmetic, width.value, ScoreKind::dropped>,
                               DroppedPlainScores>(scope, a, workspace);
            } else {
              launch_gradients<BackwardTilesOf<Arithmetic, width.value, ScoreKind::plain>,
                               PlainScores>(scope, a, workspace);
            }
          },
          Width<64>{}, Width<128>{}, Width<256>{});
    }
    if (has_masked_scores(p, a.chunked) && std::max(p.head_dim, p.head_dim_v) <= 256) {
      launch_row_terms<Element, GeneralScores<float>>(scope, a);
      return with_width(
          p,
          [&](auto width) {
            launch_all_gradients<Arithmetic, width.value, MaskedScores<Element>>(scope, a,
                                                                                 workspace);
          },
          Width<64>{}, Width<128>{}, Width<256>{});
    }
    general(Arithmetic{}, Width<64>{}, Width<128>{}, Width<256>{}, Width<512>{});
  } else if constexpr (sizeof(Element) == 4) {
    using Arithmetic = SplitTensorCores<Side::left>;
    if (is_short_fp32(p)) return general(MultiplyAdds<Element>{}, Width<kShortFp32>{});
    if (has_plain_fp32_tiles(p)) {
      launch_row_terms<Element, PlainFp32Scores>(scope, a);
      return with_width(
          p,
          [&](auto width) {
            launch_gradients<BackwardTilesOf<Arithmetic, width.value, ScoreKind::plain>,
                             PlainFp32Scores>(scope, a, workspace);
          },
          Width<64>{}, Width<128>{});
    }
    general(Arithmetic{}, Width<64>{}, Width<128>{}, Width<512>{});
  } else {
    general(MultiplyAdds<Element>{}, Width<64>{}, Width<512>{});
  }
}

}  // namespace flashattn::cuda::portable
