#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const MicrokernelSet kAvx512 = vector_microkernel_set();

}  // namespace flashattn::cpu
