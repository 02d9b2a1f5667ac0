#include "cpu/microkernel_tables.h"
#include "cpu/vector_microkernels.h"

namespace flashattn::cpu {
namespace {
struct Isa {
  static constexpr const char* kName = "avx512";
  static constexpr int kBytes = 64;
  static constexpr int kRows = 6, kVectors = 4;  // 32 vector registers: 24 hold C, 4 a row of B
};
}  // namespace

constinit const Microkernels<float> kAvx512Float = VectorMicrokernels<float, Isa>::table();
constinit const Microkernels<double> kAvx512Double = VectorMicrokernels<double, Isa>::table();

}  // namespace flashattn::cpu
