#include "cpu/microkernels.h"

#include <cstdlib>
#include <string_view>

#include "cpu/microkernel_tables.h"

namespace flashattn::cpu {
namespace {

struct InstructionSet {
  const Microkernels<float>* for_float;
  const Microkernels<double>* for_double;
};

// Best first; __builtin_cpu_supports also asks whether the operating system saves the registers.
InstructionSet choose() {
  const char* variable = std::getenv("FLASHATTN_EXT_CPU");
  const std::string_view cap = variable ? variable : "";
#if defined(FLASHATTN_HAS_AVX2) && defined(FLASHATTN_HAS_AVX512)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && cap != "avx2" && cap != "baseline") return {&kAvx512Float, &kAvx512Double};
  if (avx2 && cap != "baseline") return {&kAvx2Float, &kAvx2Double};
#endif
  return {&kBaselineFloat, &kBaselineDouble};
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

template <>
const Microkernels<float>& microkernels<float>() {
  return *chosen().for_float;
}
template <>
const Microkernels<double>& microkernels<double>() {
  return *chosen().for_double;
}

const char* instruction_set() { return chosen().for_float->name; }

}  // namespace flashattn::cpu
