// From a forward problem to a kernel of the portable family.
#pragma once

#include "cuda/flash/portable/forward_kernel.cuh"
#include "cuda/flash/portable/launch.h"
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

template <class Tile, class Scores>
void launch_forward_kernel(const OpScope& scope, ForwardArguments a) {
  a.row_tile = Tile::kRows;
  a.value_tile = Tile::kValueDim;
  a.parts = static_cast<int>(divide_up(a.problem.sequences.max_len_q, Tile::kRows));
  a.value_parts = static_cast<int>(divide_up(a.problem.head_dim_v, Tile::kValueDim));
  if (a.value_parts < 1) a.value_parts = 1;  // lse is wanted still
  if (a.blocks() == 0) return;
  launch(scope, {a.blocks(), Tile::kThreads, sizeof(ForwardShared<Tile, Scores>)},
         flash_forward_kernel<Tile, Scores>, a);
}

// Plain and general scores have tiles of their own: the general ones are fewer, since none is the
// hot path of its width.
template <class Element>
void launch_forward(const OpScope& scope, const ForwardArguments& a) {
  const AttentionProblem& p = a.problem;
  const auto general = [&](auto arithmetic, auto... widths) {
    using Arithmetic = decltype(arithmetic);
    with_width(
        p,
        [&](auto width) {
          launch_forward_kernel<ForwardTiles<Arithmetic, width.value, true>,
                                GeneralScores<typename Arithmetic::Real>>(scope, a);
        },
        widths...);
  };
  if constexpr (sizeof(Element) == 2) {
    if (has_plain_scores(p) && !a.outputs.max_logits && std::max(p.head_dim, p.head_dim_v) <= 256) {
      return with_width(
          p,
          [&](auto width) {
            launch_forward_kernel<ForwardTiles<TensorCores<Element>, width.value, false>,
                                  PlainScores>(scope, a);
          },
          Width<64>{}, Width<96>{}, Width<128>{}, Width<192>{}, Width<256>{});
    }
    general(TensorCores<Element>{}, Width<64>{}, Width<128>{}, Width<256>{}, Width<512>{});
  } else if constexpr (sizeof(Element) == 4) {
    general(MultiplyAdds<Element>{}, Width<64>{}, Width<128>{}, Width<512>{});
  } else {
    general(MultiplyAdds<Element>{}, Width<64>{}, Width<512>{});
  }
}

}  // namespace flashattn::cuda::portable
