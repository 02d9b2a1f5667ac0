#include "cpu/softmax.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/constants.h"
#include "core/tile_schedule.h"
#include "cpu/parallel.h"
#include "cpu/vector_math.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kLanes = 16;             // independent accumulators of a reduction along a row
constexpr int64_t kColumns = 64;           // columns that are reduced together where inner > 1
constexpr int64_t kTaskElements = 1 << 15;  // below this a task costs more to hand out than to do

// Reduces term(0) ... term(n - 1). The lanes are what lets the compiler use SIMD: it may not
// reorder a floating-point sum by itself.
template <class Real, class Term, class Join>
Real reduce(int64_t n, Real initial, const Term& term, const Join& join) {
  Real lanes[kLanes];
  std::fill_n(lanes, kLanes, initial);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = join(lanes[lane], term(i + lane));
    }
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] = join(lanes[lane], term(i));
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

template <class Real>
Real larger(Real a, Real b) {  // a NaN is skipped here and found again by the sum
  return b > a ? b : a;
}
template <class Real>
Real plus(Real a, Real b) {
  return a + b;
}

// The two formulas. The maximum is subtracted first: log_softmax stays exact near -1e7, and a row
// of -inf gives NaN (-inf minus -inf) as in torch.
template <class Real>
struct ForwardTerm {
  SoftmaxKind kind;
  Real max, factor;  // factor: 1 / sum, or log(sum)

  ForwardTerm(SoftmaxKind kind, Real max, Real sum)
      : kind(kind), max(max), factor(kind == SoftmaxKind::softmax ? 1 / sum : std::log(sum)) {}
};

template <class Real>
struct BackwardTerm {
  SoftmaxKind kind;

  // What is summed along the row, and the gradient, given that sum.
  Real summand(Real grad, Real output) const {
    return kind == SoftmaxKind::softmax ? grad * output : grad;
  }
  Real gradient(Real grad, Real output, Real sum) const {
    return kind == SoftmaxKind::softmax ? (grad - sum) * output
                                        : grad - exponential_simd(output) * sum;
  }
};

template <class In, class Out>
void forward_row(SoftmaxKind kind, const In* input, int64_t length, Out* output) {
  using Real = Accumulator<In>;
  const Real max = reduce(
      length, kNegativeInfinity<Real>, [&](int64_t i) { return convert<Real>(input[i]); },
      larger<Real>);
  const Real sum = reduce(
      length, Real(0), [&](int64_t i) { return exponential_simd(convert<Real>(input[i]) - max); },
      plus<Real>);
  const ForwardTerm<Real> term(kind, max, sum);
  if (kind == SoftmaxKind::softmax) {
    for (int64_t i = 0; i < length; ++i) {
      output[i] = convert<Out>(exponential_simd(convert<Real>(input[i]) - max) * term.factor);
    }
  } else {
    for (int64_t i = 0; i < length; ++i) {
      output[i] = convert<Out>((convert<Real>(input[i]) - max) - term.factor);
    }
  }
}

// `width` adjacent columns: element l of column c at input[l * stride + c], output[l * inner + c].
template <class In, class Out>
void forward_columns(SoftmaxKind kind, const In* input, int64_t stride, int64_t length,
                     int64_t width, Out* output, int64_t inner) {
  using Real = Accumulator<In>;
  Real max[kColumns], sum[kColumns];
  std::fill_n(max, kColumns, kNegativeInfinity<Real>);
  std::fill_n(sum, kColumns, Real(0));
  for (int64_t l = 0; l < length; ++l) {
    const In* line = input + l * stride;
    for (int64_t c = 0; c < width; ++c) max[c] = larger(max[c], convert<Real>(line[c]));
  }
  for (int64_t l = 0; l < length; ++l) {
    const In* line = input + l * stride;
    for (int64_t c = 0; c < width; ++c) sum[c] += exponential_simd(convert<Real>(line[c]) - max[c]);
  }
  for (int64_t c = 0; c < width; ++c) sum[c] = ForwardTerm<Real>(kind, max[c], sum[c]).factor;
  for (int64_t l = 0; l < length; ++l) {
    const In* line = input + l * stride;
    Out* out = output + l * inner;
    if (kind == SoftmaxKind::softmax) {
      for (int64_t c = 0; c < width; ++c) {
        out[c] = convert<Out>(exponential_simd(convert<Real>(line[c]) - max[c]) * sum[c]);
      }
    } else {
      for (int64_t c = 0; c < width; ++c) {
        out[c] = convert<Out>((convert<Real>(line[c]) - max[c]) - sum[c]);
      }
    }
  }
}
