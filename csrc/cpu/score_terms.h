// From dot products to scores: everything that the attention formula does between query * key and
// the softmax, for the pairs of one (sequence, head). Forward, backward and the naive kernels share
// it, so they cannot disagree. The microkernels apply it (vector/scores.h).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/softmax_gradient.h"

namespace flashattn::cpu {

template <class Real>
struct ScoreTerms {
  SequenceMask mask;
  Real scale;
  Softcap<Real> softcap;
  const void* attn_mask = nullptr;  // the mask's element for row 0, column 0; null: none
  DType attn_mask_dtype = DType::boolean;
  int64_t attn_mask_row_stride = 0, attn_mask_column_stride = 0;  // 0 where it is broadcast
  bool has_alibi = false;
  Real alibi_slope = 0;

  ScoreTerms(const AttentionProblem& problem, int64_t batch, int64_t head, const SequenceMask& mask)
      : mask(mask),
        scale(static_cast<Real>(problem.scale)),
        softcap{static_cast<Real>(problem.softcap)} {
    if (problem.attn_mask) {
      const UntypedView4& view = problem.attn_mask.view;
      const int64_t offset = (view.size[0] > 1 ? batch * view.stride[0] : 0) +
                             (view.size[1] > 1 ? head * view.stride[1] : 0);
      attn_mask_dtype = problem.attn_mask.dtype;
      attn_mask = static_cast<const char*>(view.data) + offset * size_of(attn_mask_dtype);
      attn_mask_row_stride = view.size[2] > 1 ? view.stride[2] : 0;
      attn_mask_column_stride = view.size[3] > 1 ? view.stride[3] : 0;
    }
    if (problem.alibi_slopes) {
      has_alibi = true;
      alibi_slope = *problem.alibi_slopes.as<const Real>().at(batch, head);
    }
  }

  bool has_softcap() const { return softcap.cap > Real(0); }
  // Nothing but the scale and what hides keys.
  bool adds_nothing() const {
    return !has_softcap() && !has_alibi && (!attn_mask || attn_mask_dtype == DType::boolean);
  }
};

}  // namespace flashattn::cpu
