// From a forward problem to a kernel of the portable family.
#pragma once

#include "cuda/flash/portable/forward_kernel.cuh"
#include "cuda/flash/portable/launch.h"
#include "cuda/flash/portable/split_kernel.cuh"
#include "cuda/launch.cuh"

namespace flashattn::cuda::portable {

template <int Columns>
using Width = std::integral_constant<int, Columns>;

// Calls function with the first width that head_dim and head_dim_v fit into.
template <class Function, class... Widths>
void with_width(const AttentionProblem& p, const Function& function, Widths... widths) {
  const int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const auto attempt = [&](auto width) {
    if (dim > width.value) return false;
    function(width);
    return true;
  };
  (attempt(widths) || ...);
}

template <class Tile>
int64_t blocks_at_once(const OpScope& scope) {
  return int64_t{scope.device().multiprocessors} * Tile::kBlocksPerMultiprocessor;
}

// Under a causal mask sections of at least three times the blocks that run at once: hardly anybody
// waits at the end, and what their heads share still lies in the cache. Packed sequences differ in
// work whatever the mask, and have few heads.
template <class Tile>
BlockOrder order_of(const OpScope& scope, const AttentionProblem& p, int64_t parts, int64_t heads) {
  int64_t sections = heads;
  if (p.sequences.packed()) {
    sections = 1;
  } else if (p.mask_rule.causal) {
    sections = std::max<int64_t>(parts * heads / (3 * blocks_at_once<Tile>(scope)), 1);
  }
  return {parts, heads, sections};
}

// How many runs a row tile's keys are split into: as many as fill the GPU once, each of at least
// four key tiles.
template <class Tile>
int64_t splits_of(const OpScope& scope, const AttentionProblem& p, int64_t blocks) {
  if (p.sequences.packed()) return 1;
  const int64_t wanted = blocks_at_once<Tile>(scope) / blocks;
  const int64_t most = p.sequences.max_len_k / (4 * Tile::kKeys);
  return std::max<int64_t>(std::min({wanted, most, int64_t{kMostSplits}}), 1);
}

// The tile that a kernel was compiled with: function(tile).
template <class Tiles, class Function, class... Parameters>
void with_device_tile(const OpScope& scope, void (*kernel)(Parameters...),
                      const Function& function) {
  using Large = typename Tiles::template For<Room::large>;
  if constexpr (std::is_same_v<typename Tiles::template For<Room::small>, Large> &&
                std::is_same_v<typename Tiles::template For<Room::medium>, Large>) {
    return function(Large{});
  }
  cudaFuncAttributes attributes;
  FLASHATTN_CUDA_CHECK(scope.op(), cudaFuncGetAttributes(&attributes, kernel));
  switch (room_of(attributes.ptxVersion)) {
    case Room::small: return function(typename Tiles::template For<Room::small>{});
    case Room::medium: return function(typename Tiles::template For<Room::medium>{});
    case Room::large: return function(typename Tiles::template For<Room::large>{});
  }
}

template <class Tiles, class Scores>
void launch_forward_kernel(const OpScope& scope, ForwardArguments a, const Workspace& workspace) {
  with_device_tile<Tiles>(scope, flash_forward_kernel<Tiles, Scores>, [&](auto tile) {
    using Tile = decltype(tile);
    using Element = typename Tile::Arithmetic::Element;
    using Real = typename Tile::Arithmetic::Real;
    const AttentionProblem& p = a.problem;
    a.value_parts = Divisor(divide_up(p.head_dim_v, Tile::kValueDim));  // 1 for lse alone
    a.heads = Divisor(p.heads_q);
    a.group = Divisor(p.group_size());
    const int64_t parts = tiles_of_rows(p.sequences, Tile::kRows);
    const int64_t heads = batches_of(p.sequences) * p.heads_q * a.value_parts.value();
    if (parts * heads == 0) return;
    const int64_t splits = splits_of<Tile>(scope, p, parts * heads);
    a.splits = Divisor(splits);
    a.order = order_of<Tile>(scope, p, parts, heads * splits);
    if (splits > 1) {
      const int64_t lse = 2 * splits * a.rows(), out = splits * a.rows() * p.head_dim_v;
      a.partial_lse = workspace((lse + out) * int64_t{sizeof(Real)});
      a.partial_out = static_cast<Real*>(a.partial_lse) + lse;
    }
    launch(scope, {a.order.blocks(), Tile::kThreads, sizeof(ForwardShared<Tile, Scores>)},
           flash_forward_kernel<Tiles, Scores>, a);
    if (splits > 1) {
      launch(scope, {a.rows(), 32 * kJoinWarps}, flash_join_splits_kernel<Element>, a);
    }
  });
}

// A call of one query row a sequence as one of one head a group, whose rows are the heads.
inline ForwardArguments heads_as_rows(ForwardArguments a) {
  AttentionProblem& p = a.problem;
  const int64_t group = p.group_size();
  ForwardOutputs& out = a.outputs;
  if (p.sequences.packed() || p.sequences.storage_q != 1 || group == 1) return a;
  if (out.max_logits) return a;  // one of each head
  for (UntypedView4* view : {&p.query, &out.out, &out.lse, &out.out_low, &out.lse_low}) {
    view->size[1] = p.heads_kv;
    view->size[2] = group;
    view->stride[2] = view->stride[1];
    view->stride[1] *= group;
  }
  p.heads_q = p.heads_kv;
  p.sequences.storage_q = p.sequences.max_len_q = group;
  a.rows_are_heads = true;
  return a;
}

// fp32 by multiply-adds, and by tensor cores with plain scores.
inline bool is_short_fp32(const AttentionProblem& p) {
  return std::max(p.head_dim, p.head_dim_v) <= kShortFp32;
}
inline bool has_plain_fp32_tiles(const AttentionProblem& p) {
  return has_plain_scores(p) && !p.dropout && std::max(p.head_dim, p.head_dim_v) <= 128;
}

// Plain and general scores have tiles of their own: the general ones are fewer, since none is the
// hot path of its width.
template <class Element>
void launch_forward(const OpScope& scope, const ForwardArguments& a, const Workspace& workspace) {
  const AttentionProblem& p = a.problem;
  const auto general = [&](auto arithmetic, auto... widths) {
    using Arithmetic = decltype(arithmetic);
    with_width(
        p,
        [&](auto width) {
          launch_forward_kernel<ForwardTiles<Arithmetic, width.value, ScoreKind::general>,
                                GeneralScores<typename Arithmetic::Real>>(scope, a, workspace);
        },
        widths...);
  };
  if constexpr (sizeof(Element) == 2) {
    if (has_plain_scores(p) && !a.outputs.max_logits && std::max(p.head_dim, p.head_dim_v) <= 256) {
      using Arithmetic = TensorCores<Element>;
      if (p.dropout) {
        return with_width(
            p,
            [&](auto width) {
              launch_forward_kernel<ForwardTiles<Arithmetic, width.value, ScoreKind::dropped>,
                                    DroppedPlainScores>(scope, a, workspace);
            },
            Width<64>{}, Width<128>{}, Width<256>{});
      }
      if (p.sequences.max_len_q <= kFewRows) {
        return with_width(
            p,
            [&](auto width) {
              launch_forward_kernel<FewRowsTile<Arithmetic, width.value>, PlainScores>(
                  scope, heads_as_rows(a), workspace);
            },
            Width<64>{}, Width<128>{}, Width<256>{});
      }
      return with_width(
          p,
          [&](auto width) {
            launch_forward_kernel<ForwardTiles<Arithmetic, width.value, ScoreKind::plain>,
                                  PlainScores>(scope, a, workspace);
          },
          Width<64>{}, Width<96>{}, Width<128>{}, Width<192>{}, Width<256>{});
    }
    if (has_masked_scores(p, a.chunked) && !a.outputs.max_logits &&
        std::max(p.head_dim, p.head_dim_v) <= 256) {
      return with_width(
          p,
          [&](auto width) {
            launch_forward_kernel<
                ForwardTiles<TensorCores<Element>, width.value, ScoreKind::masked>,
                MaskedScores<Element>>(scope, a, workspace);
          },
          Width<64>{}, Width<128>{}, Width<256>{});
    }
    general(TensorCores<Element>{}, Width<64>{}, Width<128>{}, Width<256>{}, Width<512>{});
  } else if constexpr (sizeof(Element) == 4) {
    using Arithmetic = SplitTensorCores<Side::left>;
    if (is_short_fp32(p)) return general(MultiplyAdds<Element>{}, Width<kShortFp32>{});
    if (has_plain_fp32_tiles(p)) {
      if (p.sequences.max_len_q <= kFewRows) {
        return with_width(
            p,
            [&](auto width) {
              launch_forward_kernel<FewRowsTile<Arithmetic, width.value>, PlainFp32Scores>(
                  scope, heads_as_rows(a), workspace);
            },
            Width<64>{}, Width<128>{});
      }
      return with_width(
          p,
          [&](auto width) {
            launch_forward_kernel<ForwardTiles<Arithmetic, width.value, ScoreKind::plain>,
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
