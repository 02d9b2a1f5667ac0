// From a forward problem to a kernel of the portable family.
#pragma once

#include "cuda/flash/portable/forward_kernel.cuh"
#include "cuda/flash/portable/launch.h"
#include "cuda/launch.cuh"

namespace flashattn::cuda::portable {

// Scores that are a positive multiple of the dot product need no pass of their own.
inline bool has_plain_scores(const AttentionProblem& p) {
  return p.scale > 0 && p.softcap == 0 && !p.attn_mask && !p.alibi_slopes && !p.sinks && !p.dropout;
}

template <int Columns>
using Width = std::integral_constant<int, Columns>;

template <class Tile, class Terms>
void launch_forward_kernel(const OpScope& scope, ForwardArguments a) {
  a.row_tile = Tile::kRows;
  a.value_tile = Tile::kValueDim;
  a.parts = divide_up(a.problem.sequences.max_len_q, Tile::kRows);
  a.value_parts = static_cast<int>(divide_up(a.problem.head_dim_v, Tile::kValueDim));
  if (a.value_parts < 1) a.value_parts = 1;  // lse is wanted still
  if (a.blocks() == 0) return;
  launch(scope, {a.blocks(), Tile::kThreads, sizeof(ForwardShared<Tile>)},
         flash_forward_kernel<Tile, Terms>, a);
}

// Plain and general scores have tiles of their own: the general ones are fewer, since each costs
// compile time and none is a hot path of its width.
template <class Element, class Terms>
void launch_forward_terms(const OpScope& scope, const ForwardArguments& a) {
  const int64_t dim = std::max(a.problem.head_dim, a.problem.head_dim_v);
  const auto with_tile = [&](auto arithmetic, auto... dims) {
    using Arithmetic = decltype(arithmetic);
    const auto attempt = [&](auto width) {
      if (dim > width.value) return false;
      launch_forward_kernel<ForwardTileOf<Arithmetic, width.value>, Terms>(scope, a);
      return true;
    };
    (attempt(dims) || ...);
  };
  if constexpr (sizeof(Element) > 2) {
    with_tile(MultiplyAdds<Element>{}, Width<64>{}, Width<128>{}, Width<512>{});
  } else if constexpr (Terms::kGeneral) {
    with_tile(TensorCores<Element>{}, Width<64>{}, Width<128>{}, Width<256>{}, Width<512>{});
  } else {
    with_tile(TensorCores<Element>{}, Width<64>{}, Width<96>{}, Width<128>{}, Width<192>{},
              Width<256>{});
  }
}

template <class Element>
void launch_forward(const OpScope& scope, ForwardArguments a) {
  const AttentionProblem& p = a.problem;
  using Real = Accumulator<Element>;
  if constexpr (sizeof(Element) == 2) {
    const bool plain =
        has_plain_scores(p) && !a.outputs.max_logits && std::max(p.head_dim, p.head_dim_v) <= 256;
    if (plain) return launch_forward_terms<Element, PlainScores<Real>>(scope, a);
  }
  launch_forward_terms<Element, GeneralScores<Real>>(scope, a);
}

}  // namespace flashattn::cuda::portable
