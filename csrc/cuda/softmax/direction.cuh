// What is computed along a row, forward and backward, apart from who holds which element: the
// kernels are written once for both.
//
// A direction has operands (tensors that are read), a State that is gathered along the row in any
// order, and results that follow from the State of the whole row. Values are x[operand][element].
#pragma once

#include "core/constants.h"
#include "core/softmax_formula.h"
#include "cuda/numeric.cuh"

namespace flashattn::cuda {

// Joins one number of each of `lanes` (a power of two) neighbouring lanes; all get the result.
template <class Real, class Join>
__device__ __forceinline__ Real join_numbers(Real number, int lanes, const Join& join) {
#pragma unroll  // shorter than a loop that counts
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance < lanes) number = join(number, __shfl_xor_sync(0xffffffffu, number, distance));
  }
  return number;
}

template <class In, class Out>
struct Forward {
  using Read = In;
  using Written = Out;
  using Real = Accumulator<In>;
  static constexpr int kOperands = 1;  // input
  static constexpr int kAhead = 1;     // operands that are asked for ahead of their loads

  // The online softmax (Milakov and Gimelshein, arXiv:1805.02867), without branches.
  struct State {
    Real max, sum;  // sum of exp(x - max)
  };
  using Exponential = ExponentialBelow<Out, Real>;
  struct Totals {
    Real max, normaliser;
    Exponential terms;  // of rows in memory
  };

  SoftmaxFormula formula;

  // Stands for the elements that a row does not have: it changes no State.
  __device__ static Real outside() { return kNegativeInfinity<Real>; }
  __device__ static State empty() { return {kNegativeInfinity<Real>, Real(0)}; }

  __device__ static State join(State a, State b) {
    const Real max = larger(a.max, b.max);
    const Real reference = finite_or_zero(max);
    return {max, a.sum * exponential<Out>(a.max - reference) +
                     b.sum * exponential<Out>(b.max - reference)};
  }

  // The State of `lanes` neighbouring lanes.
  __device__ static State join_lanes(State state, int lanes) {
    const Real max = join_numbers(state.max, lanes, [](Real a, Real b) { return larger(a, b); });
    const Real sum = state.sum * exponential<Out>(state.max - finite_or_zero(max));
    return {max, join_numbers(sum, lanes, [](Real a, Real b) { return a + b; })};
  }

  // For rows in registers: the State of all that `lanes` neighbouring lanes hold. For softmax each
  // x becomes exp(x - max), so that exp is computed once.
  template <int Count>
  __device__ State gather(Real (&x)[kOperands][Count], int lanes) const {
    Real max = x[0][0];
#pragma unroll
    for (int i = 1; i < Count; ++i) max = larger(max, x[0][i]);
    max = join_numbers(max, lanes, [](Real a, Real b) { return larger(a, b); });
    const Real reference = finite_or_zero(max);
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const Real term = exponential<Out>(x[0][i] - reference);
      sum += term;
      if (!formula.is_log()) x[0][i] = term;
    }
    return {max, join_numbers(sum, lanes, [](Real a, Real b) { return a + b; })};
  }

  // What turns gathered values into results: `own` is what gather returned, `row` the whole row's.
  __device__ Totals totals_of_gathered(State own, State row) const {
    const Real normaliser = formula.normaliser(row.sum);
    if (formula.is_log()) return {row.max, normaliser, {}};
    return {row.max, exponential<Out>(own.max - row.max) * normaliser, {}};
  }
  template <int Count>
  __device__ Real result_of_gathered(const Real (&x)[kOperands][Count], int i, Totals row) const {
    return formula.value(formula.is_log() ? x[0][i] - row.max : x[0][i], row.normaliser);
  }

  // For rows in memory: adds values to a thread's State.
  template <int Count>
  __device__ State add(State state, const Real (&x)[kOperands][Count]) const {
    Real max = state.max;
#pragma unroll
    for (int i = 0; i < Count; ++i) max = larger(max, x[0][i]);
    const Real reference = finite_or_zero(max);
    const Exponential terms(reference);
    Real sum = 0;  // apart from the State's, which may be too large to add single terms to
#pragma unroll
    for (int i = 0; i < Count; ++i) sum += terms(x[0][i]);
    return {max, state.sum * exponential<Out>(state.max - reference) + sum * terms.correction()};
  }
  __device__ Totals totals(State row) const {
    const Exponential terms(row.max);
    const Real normaliser = formula.normaliser(row.sum);
    return {row.max, formula.is_log() ? normaliser : normaliser * terms.correction(), terms};
  }
  template <int Count>
  __device__ Real result(const Real (&x)[kOperands][Count], int i, Totals row) const {
    const Real term = formula.is_log() ? x[0][i] - row.max : row.terms(x[0][i]);
    return formula.value(term, row.normaliser);
  }

 private:
  // -inf minus -inf must not poison a part of a row whose other parts are finite.
  __device__ static Real finite_or_zero(Real max) {
    return max == kNegativeInfinity<Real> ? Real(0) : max;
  }
};

template <class In, class Out>
struct Backward {
  using Read = In;
  using Written = Out;
  using Real = Accumulator<In>;
  static constexpr int kOperands = 2;  // grad_output, output
  static constexpr int kAhead = 0;     // with two nothing is gained

  struct State {
    Real sum;
  };
  using Totals = State;

  SoftmaxFormula formula;

  __device__ static Real outside() { return Real(0); }
  __device__ static State empty() { return {Real(0)}; }
  __device__ static State join(State a, State b) { return {a.sum + b.sum}; }

  __device__ static State join_lanes(State state, int lanes) {
    return {join_numbers(state.sum, lanes, [](Real a, Real b) { return a + b; })};
  }

  template <int Count>
  __device__ State gather(const Real (&x)[kOperands][Count], int lanes) const {
    return join_lanes(add(empty(), x), lanes);
  }
  __device__ Totals totals_of_gathered(State, State row) const { return row; }
  template <int Count>
  __device__ Real result_of_gathered(const Real (&x)[kOperands][Count], int i, Totals row) const {
    return result(x, i, row);
  }

  template <int Count>
  __device__ State add(State state, const Real (&x)[kOperands][Count]) const {
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < Count; ++i) sum += formula.summand(x[0][i], x[1][i]);
    return {state.sum + sum};
  }
  __device__ Totals totals(State row) const { return row; }
  template <int Count>
  __device__ Real result(const Real (&x)[kOperands][Count], int i, Totals row) const {
    const Real probability = formula.is_log() ? exponential<Out>(x[1][i]) : x[1][i];
    return formula.gradient(x[0][i], probability, row.sum);
  }
};

// A direction's tensors.
template <class Direction>
struct Tensors {
  SoftmaxShape shape;
  SoftmaxOperand operand[Direction::kOperands];  // (outer, length, inner)
  typename Direction::Written* result;           // (outer, length, inner), contiguous

  __device__ const typename Direction::Read* slab(int o, int64_t index) const {
    return static_cast<const typename Direction::Read*>(operand[o].data) +
           operand[o].outer.offset(index);
  }
};

}  // namespace flashattn::cuda
