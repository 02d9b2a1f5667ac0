// Naive attention on CUDA, forward and backward, on the current stream of `device`, which must be
// torch's current device too (cuBLAS is reached through torch's handle).
// No CUDA header: the front desk includes this in builds without CUDA too.
#pragma once

#include "core/problem.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

// `probs` and `weights` are contiguous. max_logits (-inf) is filled by the caller.
void naive_forward(const AttentionProblem& problem, const NaiveOutputs& outputs, int device,
                   const Workspace& workspace);

// The terms of the gradients that are sums over rows, heads or batch entries; the caller adds them
// up. Contiguous, of the accumulator type; null unless asked for.
struct NaiveGradientTerms {
  void* scores;     // (batch, heads_q, len_q, len_k): of grad_mask
  void* row_alibi;  // (batch, heads_q, len_q): of grad_alibi
  void* row_sinks;  // (batch, heads_q, len_q): of grad_sinks
};

// `probs` and `grad_weights` are contiguous. Of `outputs`, grad_query, grad_key and grad_value.
void naive_backward(const AttentionProblem& problem, const NaiveBackwardInputs& inputs,
                    const BackwardOutputs& outputs, const NaiveGradientTerms& terms, int device,
                    const Workspace& workspace);

}  // namespace flashattn::cuda
