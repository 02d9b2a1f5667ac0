#include "cpu/vector/table.h"

namespace flashattn::cpu {

constinit const MicrokernelSet kBaseline = vector_microkernel_set();

}  // namespace flashattn::cpu
