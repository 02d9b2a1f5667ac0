// The portable family's launchers, one instantiation of each a dtype (forward_*.cu, backward_*.cu).
#pragma once

#include "cuda/device.h"
#include "cuda/flash/arguments.h"
#include "cuda/flash/packed_tiles.cuh"
#include "cuda/workspace.h"

namespace flashattn::cuda::portable {

// Scores that are a positive multiple of the dot product need no pass of their own. Dropout leaves
// scores alone.
inline bool has_plain_scores(const AttentionProblem& p) {
  return p.scale > 0 && p.softcap == 0 && !p.attn_mask && !p.alibi_slopes && !p.sinks;
}

// What is told apart by the first dimension: packed sequences share one.
inline int64_t batches_of(const Sequences& s) { return s.packed() ? 1 : s.count; }

// Tiles of the longest sequence, or of all packed sequences.
inline int64_t tiles_of_rows(const Sequences& s, int size) {
  return s.packed() ? packed_tiles(s.storage_q, s.count, size) : divide_up(s.max_len_q, size);
}
// Dense keys that no query sees have gradients too.
inline int64_t tiles_of_keys(const Sequences& s, int size) {
  return s.packed() ? packed_tiles(s.storage_k, s.count, size) : divide_up(s.storage_k, size);
}

// Whether attn_mask, which is bool or of the operands' dtype and can be loaded asynchronously, is
// the only term added to scaled dot products.
inline bool has_masked_scores(const AttentionProblem& p, const Chunked& chunked) {
  return p.attn_mask && chunked.mask && p.softcap == 0 && !p.alibi_slopes && !p.sinks &&
         !p.dropout && (p.attn_mask.dtype == DType::boolean || p.attn_mask.dtype == p.dtype);
}

template <class Element>
void launch_forward(const OpScope& scope, const ForwardArguments& arguments,
                    const Workspace& workspace);

// The row terms, then the gradients that are asked for. The row terms and the partial sums have
// their memory already.
template <class Element>
void launch_backward(const OpScope& scope, const BackwardArguments& arguments,
                     const Workspace& workspace);

}  // namespace flashattn::cuda::portable
