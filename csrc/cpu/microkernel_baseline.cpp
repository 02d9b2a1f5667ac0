#include "cpu/microkernel_tables.h"
#include "cpu/vector_microkernels.h"

namespace flashattn::cpu {
namespace {
struct Isa {
  static constexpr const char* kName = "baseline";
  static constexpr int kBytes = 16;
  static constexpr int kRows = 3, kVectors = 4;  // 16 vector registers: 12 hold C, 4 a row of B
};
}  // namespace

constinit const Microkernels<float> kBaselineFloat = VectorMicrokernels<float, Isa>::table();
constinit const Microkernels<double> kBaselineDouble = VectorMicrokernels<double, Isa>::table();

}  // namespace flashattn::cpu
