// The CPU attention kernels. Each takes a problem of any dtype, strides and packing.
#pragma once

#include "core/problem.h"
#include "cpu/microkernels.h"

namespace flashattn::cpu {

// Rows of `out` and `lse` that belong to no sequence are left alone; the caller fills them.
void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs);

// Elements of the gradients that no pair reaches are left alone; the caller fills them with zero.
void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs);

void naive_forward(const AttentionProblem& problem, const NaiveOutputs& outputs);
void naive_backward(const AttentionProblem& problem, const NaiveBackwardInputs& inputs,
                    const BackwardOutputs& outputs);

// Calls function with a value of the dtype's element type and one of the type that its matrices
// are multiplied in.
template <class Function>
void with_operand(DType dtype, const Function& function) {
  if (dtype == DType::bfloat16 && multiplies_bfloat16()) {
    return function(bfloat16{}, bfloat16{});
  }
  with_element(dtype, [&](auto element) { function(element, Accumulator<decltype(element)>{}); });
}

}  // namespace flashattn::cpu
