// The tables of every instruction set, each defined in the file of that name.
#pragma once

#include <span>

#include "cpu/microkernels.h"
#include "cpu/softmax_kernels.h"

namespace flashattn::cpu {

struct MicrokernelSet {
  Microkernels<float> for_float;
  Microkernels<float16> for_float16;
  Microkernels<bfloat16> for_bfloat16;
  Microkernels<double> for_double;
};

struct InstructionSet {
  const char* name;
  bool (*supported)();  // by this processor and operating system
  const MicrokernelSet* kernels;
  const SoftmaxSet* softmax;
  const Microkernels<bfloat16, bfloat16>* bfloat16_products;  // null: in float
};

// All that this build has, best first.
std::span<const InstructionSet> instruction_sets();

extern const MicrokernelSet kBaseline, kAvx2, kAvx512;
extern const SoftmaxSet kBaselineSoftmax, kAvx2Softmax, kAvx512Softmax, kAvx512Bf16Softmax;
extern const Microkernels<bfloat16, bfloat16> kAvx512Bf16, kAmx;

}  // namespace flashattn::cpu
