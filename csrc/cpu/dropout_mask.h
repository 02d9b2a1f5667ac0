// The dropout decisions as a tensor, for inspection and for tests.
#pragma once

#include "core/dropout.h"
#include "core/dropout_mask_problem.h"

namespace flashattn::cpu {

void dropout_mask(const DropoutMaskProblem& problem);

}  // namespace flashattn::cpu
