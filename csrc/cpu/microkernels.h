// The seam between attention and the instruction set: a handful of functions over small, packed,
// row-major matrices. One table per instruction set; the best that the processor has is chosen
// once.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

// Every row-major matrix that a microkernel reads as B or writes as C has a multiple of this many
// columns (a 512-bit vector of floats), so that no kernel has a column tail.
inline constexpr int64_t kColumnMultiple = 16;

constexpr int64_t padded_columns(int64_t columns) {
  return (columns + kColumnMultiple - 1) / kColumnMultiple * kColumnMultiple;
}

enum class Store : uint8_t { overwrite, accumulate };

// C (rows, columns) = or += A (rows, depth) * B (depth, columns).
template <class Real>
struct MatrixProduct {
  int64_t rows, columns, depth;
  const Real* a;
  int64_t a_row_stride, a_depth_stride;  // A may be read transposed
  const Real* b;
  int64_t b_stride;
  Real* c;
  int64_t c_stride;
  Store store;
};

template <class Real>
struct Microkernels {
  const char* name;
  void (*multiply)(const MatrixProduct<Real>& product);
  // The largest of row[0, count); NaN is passed over; -inf when count is 0.
  Real (*row_max)(const Real* row, int64_t count);
  // row = exp((row - subtract) - subtract_low), exactly 0 where row is -inf; returns the sum.
  Real (*exp_row)(Real* row, int64_t count, Real subtract, Real subtract_low);
  void (*scale_row)(Real* row, int64_t count, Real factor);
};

// The table for this processor. FLASHATTN_EXT_CPU=baseline|avx2|avx512 caps the choice.
template <class Real>
const Microkernels<Real>& microkernels();

// The instruction set in use: "baseline", "avx2" or "avx512".
const char* instruction_set();

}  // namespace flashattn::cpu
