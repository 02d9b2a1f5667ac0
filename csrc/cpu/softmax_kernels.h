// Softmax by instruction set: rows, and lines across many columns.
#pragma once

#include <cstdint>
#include <tuple>

#include "core/dtype.h"
#include "core/softmax_formula.h"

namespace flashattn::cpu {

inline constexpr int64_t kMostSoftmaxColumns = 1024, kFewestSoftmaxColumns = 32;
inline constexpr int64_t kMostSoftmaxTerms = 1 << 17;  // that stay in the cache of a core

// Lines of adjacent elements: rows, or one element each of adjacent columns.
template <class Element>
struct Lines {
  Element* data;
  int64_t stride;
  Element* operator[](int64_t line) const { return data + line * stride; }
};

// A line to write; past the caches where these would not keep it until somebody reads it.
template <class Element>
struct ResultLine {
  Element* data;
  bool past_caches;
};
template <class Element>
struct ResultLines {
  Element* data;
  int64_t stride;
  bool past_caches;
  ResultLine<Element> operator[](int64_t line) const { return {data + line * stride, past_caches}; }
};

// Of an input and an output of forward; backward reads what forward wrote. `terms` has room for
// kMostSoftmaxTerms, or for whole cache lines of all that a call gets if these are fewer.
template <class Input, class Output>
struct SoftmaxKernels {
  void (*forward_rows)(SoftmaxFormula formula, Lines<const Input> input, int64_t rows,
                       int64_t length, ResultLines<Output> output, Accumulator<Input>* terms);
  void (*backward_rows)(SoftmaxFormula formula, Lines<const Output> grad_output,
                        Lines<const Output> output, int64_t rows, int64_t length,
                        ResultLines<Input> grad_input);
  // `length` lines across `width` columns, at most kMostSoftmaxColumns, or kFewestSoftmaxColumns
  // where more are more than kMostSoftmaxTerms. What a column gets depends on no other.
  void (*forward_columns)(SoftmaxFormula formula, Lines<const Input> input, int64_t length,
                          int64_t width, ResultLines<Output> output, Accumulator<Input>* terms);
  void (*backward_columns)(SoftmaxFormula formula, Lines<const Output> grad_output,
                           Lines<const Output> output, int64_t length, int64_t width,
                           ResultLines<Input> grad_input);
};

using SoftmaxSet = std::tuple<SoftmaxKernels<float16, float16>, SoftmaxKernels<float16, float>,
                              SoftmaxKernels<bfloat16, bfloat16>, SoftmaxKernels<bfloat16, float>,
                              SoftmaxKernels<float, float>, SoftmaxKernels<double, double>>;

// Those of the instruction set in use.
const SoftmaxSet& softmax_set();

}  // namespace flashattn::cpu
