// What is computed along a row, forward and backward, apart from who holds which element: the
// kernels are written once for both.
//
// A direction has operands (tensors read), a State that is gathered along the row in any order, Totals
// made of the whole row's State, and an element's result given the Totals. Element i of operand o is
// passed as a function x(o, i), so that a 16-bit element is widened where it is used.
#pragma once

#include "core/constants.h"
#include "core/softmax_formula.h"
#include "cuda/numeric.cuh"

namespace flashattn::cuda {

template <class In, class Out>
struct Forward {
  using Read = In;
  using Written = Out;
  using Real = Accumulator<In>;
  static constexpr int kOperands = 1;  // input

  // The online softmax (Milakov and Gimelshein, arXiv:1805.02867), without branches.
  struct State {
    Real max, sum;  // sum of exp(x - max)
  };
  struct Totals {
    Real max, normaliser;
  };

  SoftmaxFormula formula;

  // Stands for the elements that a row does not have: it changes no State.
  __device__ static In outside() { return convert<In>(kNegativeInfinity<Real>); }
  __device__ static State empty() { return {kNegativeInfinity<Real>, Real(0)}; }

  // The State with `Count` elements x(0, 0) ... x(0, Count - 1) added.
  template <int Count, class Element>
  __device__ State add(State state, const Element& x) const {
    Real max = state.max;
#pragma unroll
    for (int i = 0; i < Count; ++i) max = larger(max, x(0, i));
    const Real reference = finite_or_zero(max);
    Real sum = state.sum * exponential<Out>(state.max - reference);
#pragma unroll
    for (int i = 0; i < Count; ++i) sum += exponential<Out>(x(0, i) - reference);
    return {max, sum};
  }

  __device__ static State join(State a, State b) {
    const Real max = larger(a.max, b.max);
    const Real reference = finite_or_zero(max);
    return {max, a.sum * exponential<Out>(a.max - reference) +
                     b.sum * exponential<Out>(b.max - reference)};
  }

  __device__ Totals totals(State row) const { return {row.max, formula.normaliser(row.sum)}; }

  template <class Element>
  __device__ Real result(const Element& x, int i, Totals row) const {
    const Real shifted = x(0, i) - row.max;
    return formula.value(formula.is_log() ? shifted : exponential<Out>(shifted), row.normaliser);
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

  struct State {
    Real sum;
  };
  using Totals = State;

  SoftmaxFormula formula;

  __device__ static In outside() { return convert<In>(Real(0)); }
  __device__ static State empty() { return {Real(0)}; }

  template <int Count, class Element>
  __device__ State add(State state, const Element& x) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) state.sum += formula.summand(x(0, i), x(1, i));
    return state;
  }

  __device__ static State join(State a, State b) { return {a.sum + b.sum}; }

  __device__ Totals totals(State row) const { return row; }

  template <class Element>
  __device__ Real result(const Element& x, int i, Totals row) const {
    const Real output = x(1, i);
    const Real probability = formula.is_log() ? exponential<Out>(output) : output;
    return formula.gradient(x(0, i), probability, row.sum);
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
