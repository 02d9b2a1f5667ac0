// The dropout decisions as a tensor, on the current stream of `device`. No CUDA header.
#pragma once

#include "core/dropout_mask_problem.h"

namespace flashattn::cuda {

void dropout_mask(const DropoutMaskProblem& problem, int device);

}  // namespace flashattn::cuda
