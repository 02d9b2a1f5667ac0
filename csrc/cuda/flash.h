// Flash attention on CUDA, forward and backward, on the current stream of `device`.
// No CUDA header: the front desk includes this in builds without CUDA too.
#pragma once

#include "core/problem.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

// Rows of `out` and `lse` that belong to no sequence, and max_logits (-inf), are filled by the
// caller.
void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs, int device,
                   const Workspace& workspace);

// Rows of packed gradients that belong to no sequence are left alone; the caller fills them with
// zero. `deterministic`: bitwise reproducible, by taking turns.
void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs, bool deterministic, int device,
                    const Workspace& workspace);

}  // namespace flashattn::cuda
