// The seam between attention and the instruction set: functions over tiles, one table of them for
// each instruction set (microkernel_<isa>.cpp), the best that the processor has chosen once.
//
// `Element` is what tensors hold, `Operand` what matrices are multiplied in: the accumulator's
// type, or bfloat16 itself where the processor multiplies it. Products are always accumulated in
// Real.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dropout.h"
#include "core/dtype.h"
#include "core/online_softmax.h"
#include "cpu/score_terms.h"
#include "cpu/strided_matrix.h"

namespace flashattn::cpu {

// --- packed matrices ---
//
// A product's left operand (rows, depth) is packed row by row; its right operand (depth, columns)
// too, but a 16-bit type keeps two successive depths of a column side by side: (depth / 2, columns,
// 2). Sizes in memory are padded so that no kernel has a tail: rows and columns to a multiple of
// 16, depth to 64 bytes. Whoever packs an operand fills its padding with zeros along depth;
// products write every padded column of C, but only the rows asked for.

inline constexpr int64_t kColumnMultiple = 16;

template <class Operand>
inline constexpr int64_t kDepthMultiple = sizeof(Operand) == 2 ? 32 : 16;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t padded_columns(int64_t columns) { return round_up(columns, kColumnMultiple); }

template <class Operand>
constexpr int64_t padded_depth(int64_t depth) {
  return round_up(depth, kDepthMultiple<Operand>);
}

// The row stride of a matrix of which a product reads a few columns at a time: an odd number of
// 64-byte lines, so that successive rows fall into different sets of the cache.
constexpr int64_t spread_stride(int64_t columns) {
  const int64_t lines = padded_columns(columns) / kColumnMultiple;
  return (lines > 4 ? lines | 1 : lines) * kColumnMultiple;
}

enum class Store : uint8_t { overwrite, accumulate };

// C (rows, columns) = or += A (rows, depth) * B (depth, columns); columns is a multiple of 16.
template <class Operand>
struct MatrixProduct {
  int64_t rows, columns, depth;
  const Operand* a;  // left operand
  int64_t a_stride;
  const Operand* b;  // right operand
  int64_t b_stride;  // columns from one depth to the next
  Accumulator<Operand>* c;
  int64_t c_stride;
  Store store;
};

// --- steps over one tile of scores (rows, keys) ---

// Forward: dot products become weights, and the rows' softmax states and outputs move on.
template <class Real, class Operand>
struct SoftmaxStep {
  const ScoreTerms<Real>* terms;
  Range rows, keys;             // positions in the sequence
  Real* scores;                 // (rows, padded keys): dot products, destroyed
  int64_t stride;               // of scores and keep_factors
  const Real* keep_factors;     // (rows, padded keys), from dropout; may be null
  OnlineSoftmax<Real>* states;  // (rows)
  Real* out;                    // (rows, out_columns), rescaled where a maximum grows; may be null
  int64_t out_stride, out_columns;
  Operand* weights;      // (rows, keys), left operand; may be `scores` where the types agree
  Operand* weights_low;  // what rounding lost of them; null: not wanted, or nothing is lost
  int64_t weights_stride;
};

// Backward: dot products become weights, their gradients become gradients of scores.
template <class Real>
struct GradientStep {
  const ScoreTerms<Real>* terms;
  Range rows, keys;
  int64_t stride;              // of all tiles
  const LogSumExp<Real>* lse;  // (rows)
  const Real* deltas;          // (rows)
  const Real* keep_factors;    // (rows, padded keys); may be null
  Real* weights;               // (rows, padded keys): dot products in, weights out
  Real* grads;                 // (rows, padded keys): d loss / d weight in, d loss / d score out
  Real* slopes;  // (rows, padded keys): d score / (scale * d dot) out; null without softcap
};

template <class Element, class Operand = Accumulator<Element>>
struct Microkernels {
  using Real = Accumulator<Element>;

  // Called by each thread before its first product and after its last.
  void (*enter)();
  void (*leave)();
  void (*multiply)(const MatrixProduct<Operand>& product);
  // C = A * B, whose depth is a head dim. A long one is summed up in parts: of chains of additions
  // that long the rounding errors show.
  void dot_products(const MatrixProduct<Operand>& product) const {
    constexpr int64_t kLongest = 128, kPart = 64;
    if (product.depth <= kLongest) return multiply(product);
    MatrixProduct<Operand> part = product;
    for (int64_t k = 0; k < product.depth; k += kPart) {
      part.depth = product.depth - k < kPart ? product.depth - k : kPart;
      part.a = product.a + k;
      part.b = product.b + k * product.b_stride;
      multiply(part);
      part.store = Store::accumulate;
    }
  }

  // Both forms of an operand, from a matrix or from its transpose.
  void (*pack_left)(const StridedMatrix<const Element>& from, Operand* to, int64_t stride);
  void (*pack_right)(const StridedMatrix<const Element>& from, Operand* to, int64_t stride);
  void (*pack_left_transposed)(const StridedMatrix<const Element>& from, Operand* to,
                               int64_t stride);
  void (*pack_right_transposed)(const StridedMatrix<const Element>& from, Operand* to,
                                int64_t stride);
  // The same from a tile of Reals.
  void (*tile_to_left)(const StridedMatrix<const Real>& from, Operand* to, int64_t stride);
  void (*tile_to_right)(const StridedMatrix<const Real>& from, Operand* to, int64_t stride);
  // What an operand loses of a tile by rounding: `to` has the strides of `from`, whose columns are
  // a multiple of 16.
  void (*tile_rounding)(const StridedMatrix<const Real>& from, Real* to);

  // A packed matrix of Reals, times a factor, to a tensor; what that loses by rounding; and from a
  // transposed matrix.
  void (*store)(const Real* from, int64_t stride, Real factor, const StridedMatrix<Element>& to);
  void (*store_rounding)(const Real* from, int64_t stride, Real factor,
                         const StridedMatrix<Element>& to);
  void (*store_transposed)(const Real* from, int64_t stride, Real factor,
                           const StridedMatrix<Element>& to);

  // Returns the largest score of the tile; NaN is passed over.
  Real (*softmax_step)(const SoftmaxStep<Real, Operand>& step);
  void (*gradient_step)(const GradientStep<Real>& step);
  // Scores of a whole tile in place of its dot products; slopes may be null.
  void (*score_tile)(const ScoreTerms<Real>& terms, Range rows, Range keys, Real* tile,
                     int64_t stride, Real* slopes);
  // What dropout multiplies probabilities by: 0 or keep_scale; (rows, padded keys).
  void (*dropout_tile)(const DropoutStream& stream, Range rows, Range keys, Real keep_scale,
                       Real* factors, int64_t stride);

  // Products with keys and values as they lie, column stride 1; for a few rows.
  // scores (rows, padded keys) = queries (rows, head_dim) * keys^T
  void (*dots_in_place)(const StridedMatrix<const Real>& queries,
                        const StridedMatrix<const Element>& keys, Real* scores, int64_t stride);
  // out (rows, padded head_dim_v) += weights (rows, keys) * values
  void (*weighted_sums_in_place)(const StridedMatrix<const Real>& weights,
                                 const StridedMatrix<const Element>& values, Real* out,
                                 int64_t stride);

  // --- rows ---
  // The largest of row[0, count); NaN is passed over; -inf when count is 0.
  Real (*row_max)(const Real* row, int64_t count);
  // row = exp((row - subtract) - subtract_low), exactly 0 where row is -inf; returns the sum.
  Real (*exp_row)(Real* row, int64_t count, Real subtract, Real subtract_low);
  // sums (rows) = the dot products of the rows of two matrices, to the last bit as a product has
  // them (of float operands).
  void (*row_dots)(const StridedMatrix<const Element>& a, const StridedMatrix<const Element>& b,
                   Real* sums);
};

// The table for this processor, capped by FLASHATTN_EXT_CPU; an unknown name there is an error.
template <class Element, class Operand = Accumulator<Element>>
const Microkernels<Element, Operand>& microkernels();

// Whether bfloat16 matrices are multiplied as they are.
bool multiplies_bfloat16();

// A matrix that lies as packing would lay it, in whole lines of the cache, is an operand as it is.
template <class Element, class Operand>
bool is_packed(const StridedMatrix<const Element>& from, int64_t stride) {
  return from.column_stride == 1 && from.row_stride == stride &&
         from.columns % kDepthMultiple<Operand> == 0 &&
         reinterpret_cast<uintptr_t>(from.data) % 64 == 0;
}

// The operand that a matrix is: packed into `room`, unless it is one already.
template <class Element, class Operand>
const Operand* left_operand(const Microkernels<Element, Operand>& kernels,
                            const StridedMatrix<const Element>& from, Operand* room,
                            int64_t stride) {
  if constexpr (std::is_same_v<Element, Operand>) {
    // Products of 16-bit types read rows by 16.
    const bool whole = sizeof(Operand) > 2 || from.rows % 16 == 0;
    if (whole && is_packed<Element, Operand>(from, stride)) return from.data;
  }
  kernels.pack_left(from, room, stride);
  return room;
}
template <class Element, class Operand>
const Operand* right_operand(const Microkernels<Element, Operand>& kernels,
                             const StridedMatrix<const Element>& from, Operand* room,
                             int64_t stride) {
  if constexpr (std::is_same_v<Element, Operand> && sizeof(Operand) > 2) {
    if (is_packed<Element, Operand>(from, stride)) return from.data;
  }
  kernels.pack_right(from, room, stride);
  return room;
}

// The instruction set in use: "baseline", "avx2", "avx512", "avx512_bf16" or "amx".
const char* instruction_set();

// A thread's use of a table's products.
template <class Element, class Operand>
class MicrokernelUse {
 public:
  explicit MicrokernelUse(const Microkernels<Element, Operand>& kernels) : kernels_(kernels) {
    kernels_.enter();
  }
  ~MicrokernelUse() { kernels_.leave(); }
  MicrokernelUse(const MicrokernelUse&) = delete;

 private:
  const Microkernels<Element, Operand>& kernels_;
};

}  // namespace flashattn::cpu
