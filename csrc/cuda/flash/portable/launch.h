// The portable family's launchers, one instantiation of each a dtype (forward_*.cu, backward_*.cu).
#pragma once

#include "cuda/device.h"
#include "cuda/flash/arguments.h"

namespace flashattn::cuda::portable {

template <class Element>
void launch_forward(const OpScope& scope, ForwardArguments arguments);

// The row terms, then the gradients that are asked for. `arguments.deltas` and the partial sums
// have their memory already.
template <class Element>
void launch_backward(const OpScope& scope, BackwardArguments arguments);

// How many row tiles the partial sums of backward need room for.
int64_t partial_sum_parts(const AttentionProblem& problem);

}  // namespace flashattn::cuda::portable
