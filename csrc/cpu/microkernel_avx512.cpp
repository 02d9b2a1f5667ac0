#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const MicrokernelSet kAvx512 = vector_microkernel_set();
constinit const SoftmaxSet kAvx512Softmax = vector_softmax_set();

}  // namespace flashattn::cpu
