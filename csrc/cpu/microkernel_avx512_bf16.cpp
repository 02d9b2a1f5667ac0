#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const Microkernels<bfloat16, bfloat16> kAvx512Bf16 =
    vector_microkernels<bfloat16, bfloat16>();
constinit const SoftmaxSet kAvx512Bf16Softmax = vector_softmax_set();

}  // namespace flashattn::cpu
