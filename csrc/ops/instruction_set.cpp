// The CPU instruction set in use, for flashattn_ext.explain.
#include <exception>

#include "cpu/microkernels.h"

// Empty where FLASHATTN_EXT_CPU names none, which every op then reports.
extern "C" __attribute__((visibility("default"))) const char* flashattn_ext_instruction_set() {
  try {
    return flashattn::cpu::instruction_set();
  } catch (const std::exception&) {
    return "";
  }
}
