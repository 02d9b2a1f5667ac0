// Softmax and its gradient, a vector of a row or of columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/constants.h"
#include "cpu/softmax_kernels.h"
#include "cpu/vector/exponential.h"
#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// The first `count` elements; the other lanes are `rest`.
template <class Real, class Element>
inline Vector<Real> load_or(const Element* from, int64_t count, Real rest) {
  if (count >= kLanes<Real>) return load_elements(from);
  const Vector<Real> some = load_some<Real>(from, 1, count);
  Real lanes[kLanes<Real>];
  store(lanes, some);
  for (int64_t i = count; i < kLanes<Real>; ++i) lanes[i] = rest;
  return load(lanes);
}

// Sums and maxima of a row go to four vectors in turn: none waits for the one before it, and short
// sums round less.
template <class Real>
struct FourVectors {
  Vector<Real> part[4];

  explicit FourVectors(Real value) {
    for (auto& p : part) p = broadcast(value);
  }
  // Calls body(part, begin, count) for every vector of [0, length).
  template <class Body>
  void for_each(int64_t length, const Body& body) {
    constexpr int kCount = kLanes<Real>;
    int64_t i = 0;
    for (; i + 4 * kCount <= length; i += 4 * kCount) {
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) body(part[p], i + p * kCount, kCount);
    }
    for (; i < length; i += kCount) body(part[0], i, std::min<int64_t>(kCount, length - i));
  }
  Real sum() const { return sum_of_lanes<Real>((part[0] + part[1]) + (part[2] + part[3])); }
  Real largest() const {
    return largest_lane<Real>(larger(larger(part[0], part[1]), larger(part[2], part[3])));
  }
};

template <class Real, class Body>
inline void for_each_vector(int64_t length, const Body& body) {
  constexpr int kCount = kLanes<Real>;
  int64_t i = 0;
  for (; i + kCount <= length; i += kCount) body(i, kCount);
  if (i < length) body(i, length - i);
}

// The elements [i, i + count) of a result.
template <class Real, class Element>
inline void store_result(ResultLine<Element> line, int64_t i, int64_t count, Vector<Real> vector) {
  Element* to = line.data + i;
  constexpr uintptr_t kBytes = kLanes<Real> * sizeof(Element);
  if (line.past_caches && count >= kLanes<Real> && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
    stream_elements<Real>(to, vector);
  } else {
    store_some<Real>(to, 1, count, vector);
  }
}

// A maximum that may be subtracted from -inf.
template <class Real>
inline Real or_zero(Real max) {
  return max == kNegativeInfinity<Real> ? Real(0) : max;
}

template <class Input, class Output>
struct SoftmaxRows {
  using Real = Accumulator<Input>;

  static void forward_rows(SoftmaxFormula formula, Lines<const Input> input, int64_t rows,
                           int64_t length, ResultLines<Output> output, Real* terms) {
    if (length <= kShort) {
      for (int64_t r = 0; r < rows; r += kCount) {
        forward_short(formula, {input[r], input.stride}, std::min<int64_t>(kCount, rows - r),
                      length, {output[r].data, output.stride, output.past_caches});
      }
    } else {
      for (int64_t r = 0; r < rows; ++r) forward(formula, input[r], length, output[r], terms);
    }
    if (output.past_caches) end_of_stream();
  }
  static void backward_rows(SoftmaxFormula formula, Lines<const Output> grad_output,
                            Lines<const Output> output, int64_t rows, int64_t length,
                            ResultLines<Input> grad_input) {
    for (int64_t r = 0; r < rows; ++r) {
      const Vector<Real> sum =
          broadcast(sum_of_gradients(formula, grad_output[r], output[r], length));
      store_gradient(formula, grad_output[r], output[r], length, sum, grad_input[r]);
    }
    if (grad_input.past_caches) end_of_stream();
  }

 private:
  static constexpr int kCount = kLanes<Real>;
  static constexpr int64_t kShort = 128;  // rows of which a vector's worth are reduced together

  // At most kCount rows: no row waits for its own maximum or sum.
  static void forward_short(SoftmaxFormula formula, Lines<const Input> input, int64_t rows,
                            int64_t length, ResultLines<Output> output) {
    Real terms[kCount][kShort], max[kCount], normaliser[kCount];
    Vector<Real> parts[kCount];
    std::fill_n(parts, kCount, broadcast(kNegativeInfinity<Real>));
    for (int64_t r = 0; r < rows; ++r) {
      for_each_vector<Real>(length, [&](int64_t i, int64_t count) {
        const Vector<Real> x = load_or(input[r] + i, count, kNegativeInfinity<Real>);
        store(terms[r] + i, x);
        parts[r] = larger(x, parts[r]);
      });
    }
    store(max, largest_of_rows<Real>(parts));
    std::fill_n(parts, kCount, Vector<Real>{});
    for (int64_t r = 0; r < rows; ++r) {
      const Real subtract = or_zero(max[r]);
      for_each_vector<Real>(length, [&](int64_t i, int64_t) {
        const Vector<Real> e = exponential_below_infinity(load(terms[r] + i) - subtract);
        if (formula.is_log()) {
          store(terms[r] + i, load(terms[r] + i) - max[r]);
        } else {
          store(terms[r] + i, e);
        }
        parts[r] += e;
      });
    }
    store(normaliser, sums_of_rows<Real>(parts));
    for (Real& sum : normaliser) sum = formula.normaliser(sum);
    for (int64_t r = 0; r < rows; ++r) {
      for_each_vector<Real>(length, [&](int64_t i, int64_t count) {
        store_result<Real>(output[r], i, count,
                           formula.value(load(terms[r] + i), broadcast(normaliser[r])));
      });
    }
  }

  static constexpr int64_t kChunk = 4096;  // stays in the nearest cache

  // The largest element; NaN is passed over.
  static Real largest(const Input* input, int64_t length) {
    FourVectors<Real> max(kNegativeInfinity<Real>);
    max.for_each(length, [&](Vector<Real>& part, int64_t i, int64_t count) {
      part = larger(load_or(input + i, count, kNegativeInfinity<Real>), part);
    });
    return max.largest();
  }

  // The sum of exp(input - subtract), each of which goes to keep(i, vector).
  template <class Keep>
  static Real sum_of_exponentials(const Input* input, int64_t length, Real subtract,
                                  const Keep& keep) {
    FourVectors<Real> sum(0);
    sum.for_each(length, [&](Vector<Real>& part, int64_t i, int64_t count) {
      const Vector<Real> x = load_or(input + i, count, kNegativeInfinity<Real>);
      const Vector<Real> e = exponential_below_infinity(x - subtract);
      keep(i, e);
      part += e;
    });
    return sum.sum();
  }

  static void forward(SoftmaxFormula formula, const Input* input, int64_t length,
                      ResultLine<Output> output, Real* terms) {
    if (formula.is_log() || length > kMostSoftmaxTerms) {
      return forward_again(formula, input, length, output);
    }
    const Real subtract = or_zero(largest(input, length));
    const Real sum = sum_of_exponentials(input, length, subtract,
                                         [&](int64_t i, Vector<Real> e) { store(terms + i, e); });
    const Vector<Real> normaliser = broadcast(formula.normaliser(sum));
    for_each_vector<Real>(length, [&](int64_t i, int64_t count) {
      store_result<Real>(output, i, count, formula.value(load(terms + i), normaliser));
    });
  }

  // The same with a second look at the input: a row that is too long to keep its exponentials, or
  // does not need them.
  static void forward_again(SoftmaxFormula formula, const Input* input, int64_t length,
                            ResultLine<Output> output) {
    Real max = kNegativeInfinity<Real>, sum = 0;
    for (int64_t begin = 0; begin < length; begin += kChunk) {
      const int64_t count = std::min(kChunk, length - begin);
      const Real candidate = largest(input + begin, count);
      if (candidate > max) {
        sum *= exponential_below_infinity(broadcast(max - candidate))[0];
        max = candidate;
      }
      sum += sum_of_exponentials(input + begin, count, or_zero(max), [](int64_t, Vector<Real>) {});
    }
    const Vector<Real> normaliser = broadcast(formula.normaliser(sum));
    for_each_vector<Real>(length, [&](int64_t i, int64_t count) {
      Vector<Real> term = load_or(input + i, count, Real(0)) - max;
      if (!formula.is_log()) term = exponential_below_infinity(term);
      store_result<Real>(output, i, count, formula.value(term, normaliser));
    });
  }

  static Real sum_of_gradients(SoftmaxFormula formula, const Output* grad_output,
                               const Output* output, int64_t length) {
    FourVectors<Real> sums(0);
    sums.for_each(length, [&](Vector<Real>& part, int64_t i, int64_t count) {
      part += formula.summand(load_or(grad_output + i, count, Real(0)),
                              load_or(output + i, count, Real(0)));
    });
    return sums.sum();
  }

  static void store_gradient(SoftmaxFormula formula, const Output* grad_output,
                             const Output* output, int64_t length, Vector<Real> sum,
                             ResultLine<Input> grad_input) {
    for_each_vector<Real>(length, [&](int64_t i, int64_t count) {
      Vector<Real> probability = load_or(output + i, count, Real(0));
      if (formula.is_log()) probability = exponential(probability);
      const Vector<Real> grad = load_or(grad_output + i, count, Real(0));
      store_result<Real>(grad_input, i, count, formula.gradient(grad, probability, sum));
    });
  }
};

template <class Input, class Output>
struct SoftmaxColumns {
  using Real = Accumulator<Input>;
  static constexpr int64_t kLines = 16;  // summed by themselves: short sums round less
  static constexpr int64_t kMost = kMostSoftmaxColumns;
  using Row = Real[kMost];  // one number of each column

  // Line after line, since neighbours come from memory together. Where the terms of all lines can
  // be kept, no exponential is computed twice.
  static void forward(SoftmaxFormula formula, Lines<const Input> input, int64_t length,
                      int64_t width, ResultLines<Output> output, Real* terms) {
    const int64_t pitch = round_up(width, kLanes<Real>);
    const bool kept = length <= kMostSoftmaxTerms / kFewestSoftmaxColumns;
    const int64_t block = kept ? length : kMostSoftmaxTerms / kMostSoftmaxColumns;
    Row max, sum;
    std::fill_n(max, pitch, kNegativeInfinity<Real>);
    std::fill_n(sum, pitch, Real(0));
    for (int64_t l = 0; l < length; l += block) {
      const int64_t lines = std::min(block, length - l);
      Row before;
      std::copy_n(max, pitch, before);
      load_terms({input[l], input.stride}, lines, width, {terms, pitch}, max);
      for_each_vector<Real>(pitch, [&](int64_t c, int64_t) {
        const Vector<Real> rescale =
            exponential_below_infinity(load(before + c) - or_zero(load(max + c)));
        store(sum + c, load(sum + c) * rescale);
      });
      sum_exponentials(formula, lines, pitch, terms, max, sum);
    }
    for (int64_t c = 0; c < width; ++c) sum[c] = formula.normaliser(sum[c]);
    for (int64_t l = 0; l < length; ++l) {
      for_each_vector<Real>(width, [&](int64_t c, int64_t count) {
        Vector<Real> term =
            kept ? load(terms + l * pitch + c) : load_some<Real>(input[l] + c, 1, count);
        if (formula.is_log() || !kept) term -= load(max + c);
        if (!formula.is_log() && !kept) term = exponential_below_infinity(term);
        store_result<Real>(output[l], c, count, formula.value(term, load(sum + c)));
      });
    }
    if (output.past_caches) end_of_stream();
  }

  static void backward(SoftmaxFormula formula, Lines<const Output> grad_output,
                       Lines<const Output> output, int64_t length, int64_t width,
                       ResultLines<Input> grad_input) {
    Row sum;
    std::fill_n(sum, round_up(width, kLanes<Real>), Real(0));
    add_blocks(length, width, sum, [&](int64_t l, int64_t c, int64_t count) {
      return formula.summand(load_some<Real>(grad_output[l] + c, 1, count),
                             load_some<Real>(output[l] + c, 1, count));
    });
    for (int64_t l = 0; l < length; ++l) {
      for_each_vector<Real>(width, [&](int64_t c, int64_t count) {
        Vector<Real> probability = load_some<Real>(output[l] + c, 1, count);
        if (formula.is_log()) probability = exponential(probability);
        const Vector<Real> grad = load_some<Real>(grad_output[l] + c, 1, count);
        store_result<Real>(grad_input[l], c, count,
                           formula.gradient(grad, probability, load(sum + c)));
      });
    }
    if (grad_input.past_caches) end_of_stream();
  }

 private:
  static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }
  static Vector<Real> or_zero(Vector<Real> max) {
    return max == kNegativeInfinity<Real> ? Vector<Real>{} : max;
  }

  static void load_terms(Lines<const Input> input, int64_t lines, int64_t width, Lines<Real> terms,
                         Row& max) {
    for (int64_t l = 0; l < lines; ++l) {
      for_each_vector<Real>(width, [&](int64_t c, int64_t count) {
        const Vector<Real> x = load_some<Real>(input[l] + c, 1, count);
        store(terms[l] + c, x);
        store(max + c, larger(x, load(max + c)));
      });
    }
  }

  // Adds exp(term - max) of all lines to sum; softmax keeps them as its terms.
  static void sum_exponentials(SoftmaxFormula formula, int64_t lines, int64_t pitch, Real* terms,
                               const Row& max, Row& sum) {
    add_blocks(lines, pitch, sum, [&](int64_t l, int64_t c, int64_t) {
      Real* const term = terms + l * pitch + c;
      const Vector<Real> e = exponential_below_infinity(load(term) - or_zero(load(max + c)));
      if (!formula.is_log()) store(term, e);
      return e;
    });
  }

  // Adds vector(line, column, count) of all lines to sum.
  template <class VectorAt>
  static void add_blocks(int64_t lines, int64_t width, Row& sum, const VectorAt& vector) {
    for (int64_t begin = 0; begin < lines; begin += kLines) {
      const int64_t end = std::min(begin + kLines, lines);
      Row part;
      std::fill_n(part, round_up(width, kLanes<Real>), Real(0));
      for (int64_t l = begin; l < end; ++l) {
        for_each_vector<Real>(width, [&](int64_t c, int64_t count) {
          store(part + c, load(part + c) + vector(l, c, count));
        });
      }
      for_each_vector<Real>(
          width, [&](int64_t c, int64_t) { store(sum + c, load(sum + c) + load(part + c)); });
    }
  }
};

template <class Input, class Output>
constexpr SoftmaxKernels<Input, Output> softmax_kernels() {
  return {SoftmaxRows<Input, Output>::forward_rows, SoftmaxRows<Input, Output>::backward_rows,
          SoftmaxColumns<Input, Output>::forward, SoftmaxColumns<Input, Output>::backward};
}

}  // namespace
}  // namespace flashattn::cpu
