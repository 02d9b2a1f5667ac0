#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const MicrokernelSet kBaseline = vector_microkernel_set();
constinit const SoftmaxSet kBaselineSoftmax = vector_softmax_set();

}  // namespace flashattn::cpu
