// One pair of tables per instruction set, each defined in the file of that name.
#pragma once

#include "cpu/microkernels.h"

namespace flashattn::cpu {

extern const Microkernels<float> kBaselineFloat, kAvx2Float, kAvx512Float;
extern const Microkernels<double> kBaselineDouble, kAvx2Double, kAvx512Double;

}  // namespace flashattn::cpu
