#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const Microkernels<bfloat16, bfloat16> kAvx512Bf16 =
    vector_microkernels<bfloat16, bfloat16>();

}  // namespace flashattn::cpu
