#include "cpu/microkernel_tables.h"
#include "cpu/vector_microkernels.h"

namespace flashattn::cpu {
namespace {
struct Isa {
  static constexpr const char* kName = "avx2";
  static constexpr int kBytes = 32;
  static constexpr int kRows = 6, kVectors = 2;  // 16 vector registers: 12 hold C, 2 a row of B
};
}  // namespace

constinit const Microkernels<float> kAvx2Float = VectorMicrokernels<float, Isa>::table();
constinit const Microkernels<double> kAvx2Double = VectorMicrokernels<double, Isa>::table();

}  // namespace flashattn::cpu
