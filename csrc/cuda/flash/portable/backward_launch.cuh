// From a backward problem to the kernels of the portable family.
#pragma once

#include "cuda/flash/portable/forward_launch.cuh"
#include "cuda/flash/portable/key_gradient_kernel.cuh"
#include "cuda/flash/portable/mask_gradient_kernel.cuh"
#include "cuda/flash/portable/query_gradient_kernel.cuh"
#include "cuda/flash/portable/row_terms_kernel.cuh"

namespace flashattn::cuda::portable {

template <class Element>
void launch_row_terms(const OpScope& scope, BackwardArguments a) {
  const Sequences& s = a.problem.sequences;
  a.row_parts = divide_up(s.max_len_q, kRowTermRows);
  const int64_t blocks = s.count * a.problem.heads_q * a.row_parts;
  if (blocks == 0) return;
  launch(scope, {blocks, 32 * kRowTermWarps}, flash_row_terms_kernel<Element>, a);
}

template <class Real>
void add_partials(const OpScope& scope, const BackwardArguments& a, const void* partials,
                  const UntypedView4& to, int64_t parts) {
  constexpr int kThreads = 64;
  const AttentionProblem& p = a.problem;
  if (p.heads_q == 0) return;
  launch(scope, {divide_up(p.heads_q, kThreads), kThreads}, flash_add_partials_kernel<Real>,
         static_cast<const Real*>(partials), to, p.sequences.count, p.heads_q, parts);
}

inline int slices_of(int64_t dim, int slice) {
  return static_cast<int>(std::max<int64_t>(divide_up(dim, slice), 1));
}

template <class Tile, class Terms>
void launch_query_gradient(const OpScope& scope, BackwardArguments a) {
  const AttentionProblem& p = a.problem;
  a.row_parts = divide_up(p.sequences.max_len_q, Tile::kOwn);
  const int slices = slices_of(p.head_dim, Tile::kSlice);
  const int64_t blocks = p.sequences.count * p.heads_q * slices * a.row_parts;
  if (blocks == 0) return;
  launch(scope, {blocks, Tile::kThreads, sizeof(GradientShared<Tile>)},
         flash_query_gradient_kernel<Tile, Terms>, a, slices);
  if (a.partial_alibi) {
    add_partials<typename Tile::Arithmetic::Real>(scope, a, a.partial_alibi, a.outputs.grad_alibi,
                                                  a.row_parts);
  }
}

template <class Tile, class Terms>
void launch_key_gradient(const OpScope& scope, const BackwardArguments& a) {
  const AttentionProblem& p = a.problem;
  const int64_t parts = divide_up(p.sequences.max_len_k, Tile::kOwn);
  const int slices = slices_of(std::max(p.head_dim, p.head_dim_v), Tile::kSlice);
  const int64_t blocks = p.sequences.count * p.heads_kv * slices * parts;
  if (blocks == 0) return;
  launch(scope, {blocks, Tile::kThreads, sizeof(GradientShared<Tile>)},
         flash_key_gradient_kernel<Tile, Terms>, a, slices, parts);
}

template <class Tile>
void launch_mask_gradient(const OpScope& scope, const BackwardArguments& a) {
  const int64_t* size = a.outputs.grad_mask.size;
  const int64_t row_parts = divide_up(size[2], Tile::kOwn),
                key_parts = divide_up(size[3], Tile::kStream);
  const int64_t blocks = size[0] * size[1] * row_parts * key_parts;
  if (blocks == 0) return;
  launch(scope, {blocks, Tile::kThreads, sizeof(GradientShared<Tile>)},
         flash_mask_gradient_kernel<Tile>, a, row_parts, key_parts);
}

template <class Arithmetic, int HeadDim>
void launch_gradients(const OpScope& scope, const BackwardArguments& a) {
  using QueryTile = QueryGradientTileOf<Arithmetic, HeadDim>;
  using KeyTile = KeyGradientTileOf<Arithmetic, HeadDim>;
  using Plain = PlainScores<typename Arithmetic::Real>;
  using General = GeneralScores<typename Arithmetic::Real>;
  const bool plain = has_plain_scores(a.problem);
  if (a.outputs.grad_query || a.partial_alibi) {
    plain ? launch_query_gradient<QueryTile, Plain>(scope, a)
          : launch_query_gradient<QueryTile, General>(scope, a);
  }
  if (a.outputs.grad_key || a.outputs.grad_value) {
    plain ? launch_key_gradient<KeyTile, Plain>(scope, a)
          : launch_key_gradient<KeyTile, General>(scope, a);
  }
  if (a.outputs.grad_mask) launch_mask_gradient<QueryTile>(scope, a);
}

template <class Element>
void launch_backward(const OpScope& scope, BackwardArguments a) {
  launch_row_terms<Element>(scope, a);
  if (a.partial_sinks) {
    add_partials<Accumulator<Element>>(scope, a, a.partial_sinks, a.outputs.grad_sinks,
                                       divide_up(a.problem.sequences.max_len_q, kRowTermRows));
  }
  const int64_t dim = std::max(a.problem.head_dim, a.problem.head_dim_v);
  if constexpr (sizeof(Element) == 2) {
    using Arithmetic = TensorCores<Element>;
    if (dim <= 64) return launch_gradients<Arithmetic, 64>(scope, a);
    if (dim <= 128) return launch_gradients<Arithmetic, 128>(scope, a);
    if (dim <= 256) return launch_gradients<Arithmetic, 256>(scope, a);
    return launch_gradients<Arithmetic, 512>(scope, a);
  } else if constexpr (sizeof(Element) == 4) {
    using Arithmetic = MultiplyAdds<Element>;
    if (dim <= 64) return launch_gradients<Arithmetic, 64>(scope, a);
    if (dim <= 128) return launch_gradients<Arithmetic, 128>(scope, a);
    return launch_gradients<Arithmetic, 512>(scope, a);
  } else {
    return launch_gradients<MultiplyAdds<Element>, 512>(scope, a);
  }
}

}  // namespace flashattn::cuda::portable
