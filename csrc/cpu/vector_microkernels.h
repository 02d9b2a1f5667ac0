// The microkernels, written once over compiler vectors. Each instruction set's file includes this
// with its own vector width and compiler flags. Everything is in an unnamed namespace: the linker
// must not let one file's copy of a function serve another.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "core/constants.h"
#include "cpu/microkernels.h"

namespace flashattn::cpu {
namespace {

template <class Real, int Bytes>
struct VectorOf {
  typedef Real type __attribute__((vector_size(Bytes)));
};

template <class Real, class Vector>
inline Vector load(const Real* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(Vector));
  return vector;
}

template <class Real, class Vector>
inline void store(Real* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(Vector));
}

// `Isa` gives the vector width in bytes and the register block: rows x vectors of C.
template <class Real, class Isa>
struct VectorMicrokernels {
  using Vector = typename VectorOf<Real, Isa::kBytes>::type;
  static constexpr int kLanes = Isa::kBytes / sizeof(Real);

  template <int Rows, int Vectors>
  static void multiply_block(const MatrixProduct<Real>& p, const Real* a, const Real* b, Real* c) {
    Vector sum[Rows][Vectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = p.store == Store::accumulate
                        ? load<Real, Vector>(c + r * p.c_stride + v * kLanes)
                        : Vector{};
      }
    }
    for (int64_t k = 0; k < p.depth; ++k) {
      Vector row_of_b[Vectors];
      for (int v = 0; v < Vectors; ++v) row_of_b[v] = load<Real, Vector>(b + v * kLanes);
      for (int r = 0; r < Rows; ++r) {
        const Real value = a[r * p.a_row_stride];
        for (int v = 0; v < Vectors; ++v) sum[r][v] += row_of_b[v] * value;
      }
      a += p.a_depth_stride;
      b += p.b_stride;
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) store(c + r * p.c_stride + v * kLanes, sum[r][v]);
    }
  }

  // The last rows, fewer than a full block.
  template <int Rows, int Vectors>
  static void multiply_last_rows(const MatrixProduct<Real>& p, int64_t rows, const Real* a,
                                 const Real* b, Real* c) {
    if constexpr (Rows > 0) {
      if (rows == Rows) return multiply_block<Rows, Vectors>(p, a, b, c);
      multiply_last_rows<Rows - 1, Vectors>(p, rows, a, b, c);
    }
  }

  template <int Vectors>
  static void multiply_columns(const MatrixProduct<Real>& p, int64_t column) {
    const Real* b = p.b + column;
    int64_t row = 0;
    for (; row + Isa::kRows <= p.rows; row += Isa::kRows) {
      multiply_block<Isa::kRows, Vectors>(p, p.a + row * p.a_row_stride, b,
                                          p.c + row * p.c_stride + column);
    }
    multiply_last_rows<Isa::kRows - 1, Vectors>(p, p.rows - row, p.a + row * p.a_row_stride, b,
                                                p.c + row * p.c_stride + column);
  }

  static void multiply(const MatrixProduct<Real>& p) {
    constexpr int kWide = Isa::kVectors * kLanes;
    int64_t column = 0;
    for (; column + kWide <= p.columns; column += kWide) multiply_columns<Isa::kVectors>(p, column);
    for (; column < p.columns; column += kLanes) multiply_columns<1>(p, column);
  }

  static Real row_max(const Real* row, int64_t count) {
    Real max = kNegativeInfinity<Real>;
    int64_t i = 0;
    if (count >= kLanes) {
      Vector maxima = max + Vector{};
      for (; i + kLanes <= count; i += kLanes) {
        const Vector values = load<Real, Vector>(row + i);
        maxima = values > maxima ? values : maxima;
      }
      for (int lane = 0; lane < kLanes; ++lane) max = maxima[lane] > max ? maxima[lane] : max;
    }
    for (; i < count; ++i) max = row[i] > max ? row[i] : max;
    return max;
  }

  static void scale_row(Real* row, int64_t count, Real factor) {
    for (int64_t i = 0; i < count; ++i) row[i] *= factor;
  }

  // One vector of exp_row.
  static Vector exponentials(Real* row, Real subtract, Real subtract_low) {
    const Vector p = exponential((load<Real, Vector>(row) - subtract) - subtract_low);
    store(row, p);
    return p;
  }

  static Real exp_row(Real* row, int64_t count, Real subtract, Real subtract_low) {
    int64_t i = 0;
    // Sixteen floats at least are summed apart, so that narrow vectors do not round more than wide.
    constexpr int kSums = 4;
    Vector parts[kSums]{};
    for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
      for (int part = 0; part < kSums; ++part) {
        parts[part] += exponentials(row + i + part * kLanes, subtract, subtract_low);
      }
    }
    for (; i + kLanes <= count; i += kLanes) {
      parts[0] += exponentials(row + i, subtract, subtract_low);
    }
    const Vector sums = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    Real sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    if (i < count) {
      Vector tail = kNegativeInfinity<Real> + Vector{};
      std::memcpy(&tail, row + i, (count - i) * sizeof(Real));
      tail = exponential((tail - subtract) - subtract_low);
      std::memcpy(row + i, &tail, (count - i) * sizeof(Real));
      for (int lane = 0; lane < kLanes; ++lane) sum += tail[lane];
    }
    return sum;
  }

  // exp for arguments that are rarely above 0: exact 0 at -inf and below the smallest normal
  // result, infinity above the largest finite one, NaN stays NaN.
  static Vector exponential(Vector x) {
    if constexpr (sizeof(Real) == 8) {
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = std::exp(x[lane]);
      return x;
    } else {
      // exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to
      // an integer and leaves it in the low mantissa bits. ln 2 is split in two so that r is exact.
      using Bits = typename VectorOf<uint32_t, Isa::kBytes>::type;  // wraps where x is huge
      constexpr float kRound = 0x1.8p23f;
      const Vector shifted = x * 0x1.715476p0f + kRound;
      const Vector n = shifted - kRound;
      const Vector r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
      // Minimax polynomial of exp on [-ln(2)/2, ln(2)/2], degree 6.
      Vector p = r * 0x1.6d6bfcp-10f + 0x1.123c1ap-7f;
      p = p * r + 0x1.5555e6p-5f;
      p = p * r + 0x1.5553e6p-3f;
      p = p * r + 0x1.fffffap-2f;
      p = p * r + 0x1.0p0f;
      p = p * r + 0x1.0p0f;
      const Vector scale = (Vector)((((Bits)shifted) << 23) + (Bits)(Vector{} + 1.0f));
      Vector result = p * scale;
      result = x < -0x1.5d589ep6f ? Vector{} : result;
      result = x > 0x1.62e42ep6f ? Vector{} + std::numeric_limits<float>::infinity() : result;
      return result;
    }
  }

  static constexpr Microkernels<Real> table() {
    return {Isa::kName, multiply, row_max, exp_row, scale_row};
  }
};

}  // namespace
}  // namespace flashattn::cpu
