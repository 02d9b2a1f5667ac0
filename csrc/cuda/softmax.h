// Softmax and log_softmax on CUDA, forward and backward, on the current stream of `device`.
// No CUDA header: the front desk includes this in builds without CUDA too.
#pragma once

#include "core/softmax_problem.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

void softmax_forward(const SoftmaxForwardProblem& problem, int device, const Workspace& workspace);
void softmax_backward(const SoftmaxBackwardProblem& problem, int device,
                      const Workspace& workspace);

}  // namespace flashattn::cuda
