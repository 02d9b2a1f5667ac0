// Softmax and log_softmax on the CPU, forward and backward.
#pragma once

#include "core/softmax_problem.h"

namespace flashattn::cpu {

void softmax_forward(const SoftmaxForwardProblem& problem);
void softmax_backward(const SoftmaxBackwardProblem& problem);

}  // namespace flashattn::cpu
