#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const MicrokernelSet kAvx2 = vector_microkernel_set();
constinit const SoftmaxSet kAvx2Softmax = vector_softmax_set();

}  // namespace flashattn::cpu
