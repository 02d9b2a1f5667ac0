#include "cpu/microkernels.h"

#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpu/microkernel_tables.h"

#if defined(FLASHATTN_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashattn::cpu {
namespace {

// --- what the processor and the operating system offer ---

#if defined(FLASHATTN_HAS_AMX)

// __builtin_cpu_supports also asks whether the operating system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Tile registers: the instructions, and Linux's permission for the process, which it gives where it
// saves the registers.
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileDataFeature = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) == 0;
}

#endif

bool always() { return true; }

// --- the choice ---

constexpr InstructionSet kInstructionSets[] = {
#if defined(FLASHATTN_HAS_AMX)
    {"amx", has_amx, &kAvx512, &kAvx512Bf16Softmax, &kAmx},
    {"avx512_bf16", has_avx512_bf16, &kAvx512, &kAvx512Bf16Softmax, &kAvx512Bf16},
    {"avx512", has_avx512, &kAvx512, &kAvx512Softmax, nullptr},
    {"avx2", has_avx2, &kAvx2, &kAvx2Softmax, nullptr},
#endif
    {"baseline", always, &kBaseline, &kBaselineSoftmax, nullptr},
};

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// The name of the best set that may be used; empty: any. torch's own cap is honoured too.
std::string_view cap() {
  const std::string_view own = environment("FLASHATTN_EXT_CPU");
  if (!own.empty()) return own;
  const std::string_view torch = environment("ATEN_CPU_CAPABILITY");
  return torch == "default" ? "baseline" : torch == "avx2" ? "avx2" : "";
}

const InstructionSet& choose() {
  const std::string_view cap_name = cap();
  const InstructionSet* candidate = std::begin(kInstructionSets);
  if (!cap_name.empty()) {
    std::string names;
    for (; candidate != std::end(kInstructionSets) && cap_name != candidate->name; ++candidate) {
      names += names.empty() ? "" : ", ";
      names += candidate->name;
    }
    if (candidate == std::end(kInstructionSets)) {
      throw std::runtime_error("flashattn_ext: FLASHATTN_EXT_CPU: expected one of " + names +
                               ", but got " + std::string(cap_name));
    }
  }
  while (!candidate->supported()) ++candidate;  // the last one always is
  return *candidate;
}

const InstructionSet& chosen() {
  static const InstructionSet& set = choose();
  return set;
}

}  // namespace

std::span<const InstructionSet> instruction_sets() { return kInstructionSets; }

template <>
const Microkernels<float>& microkernels() {
  return chosen().kernels->for_float;
}
template <>
const Microkernels<float16>& microkernels() {
  return chosen().kernels->for_float16;
}
template <>
const Microkernels<bfloat16>& microkernels() {
  return chosen().kernels->for_bfloat16;
}
template <>
const Microkernels<double>& microkernels() {
  return chosen().kernels->for_double;
}
template <>
const Microkernels<bfloat16, bfloat16>& microkernels() {
  return *chosen().bfloat16_products;
}

const SoftmaxSet& softmax_set() { return *chosen().softmax; }

bool multiplies_bfloat16() { return chosen().bfloat16_products != nullptr; }

const char* instruction_set() { return chosen().name; }

}  // namespace flashattn::cpu
