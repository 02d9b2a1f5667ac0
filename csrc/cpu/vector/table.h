// A table of microkernels, from the flags of the file that includes this.
#pragma once

#include "cpu/microkernel_tables.h"
#include "cpu/vector/dropout.h"
#include "cpu/vector/few_rows.h"
#include "cpu/vector/multiply.h"
#include "cpu/vector/pack.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace flashattn::cpu {
namespace {

template <class Element, class Operand>
constexpr Microkernels<Element, Operand> vector_microkernels() {
  using Real = Accumulator<Element>;
  using FromTensor = Pack<Element, Operand>;
  using FromTile = Pack<Real, Operand>;
  Microkernels<Element, Operand> table{};
  table.enter = table.leave = [] {};
  table.multiply = VectorProduct<Operand>::multiply;
  table.pack_left = FromTensor::left;
  table.pack_right = FromTensor::right;
  table.pack_left_transposed = FromTensor::left_transposed;
  table.pack_right_transposed = FromTensor::right_transposed;
  table.tile_to_left = FromTile::left;
  table.tile_to_right = FromTile::right;
  table.tile_rounding = tile_rounding<Real, Operand>;
  table.store = store_matrix<Real, Element>;
  table.store_rounding = store_rounding<Real, Element>;
  table.store_transposed = store_matrix_transposed<Real, Element>;
  table.softmax_step = softmax_step<Real, Operand>;
  table.gradient_step = gradient_step<Real>;
  table.score_tile = score_tile<Real>;
  table.dropout_tile = dropout_tile<Real>;
  table.dots_in_place = DotsInPlace<Element>::run;
  table.weighted_sums_in_place = WeightedSumsInPlace<Element>::run;
  table.row_max = row_max<Real>;
  table.exp_row = exp_row<Real>;
  table.row_dots = row_dots<Element>;
  return table;
}

constexpr MicrokernelSet vector_microkernel_set() {
  return {vector_microkernels<float, float>(), vector_microkernels<float16, float>(),
          vector_microkernels<bfloat16, float>(), vector_microkernels<double, double>()};
}

constexpr SoftmaxSet vector_softmax_set() {
  return {softmax_kernels<float16, float16>(),   softmax_kernels<float16, float>(),
          softmax_kernels<bfloat16, bfloat16>(), softmax_kernels<bfloat16, float>(),
          softmax_kernels<float, float>(),       softmax_kernels<double, double>()};
}

}  // namespace
}  // namespace flashattn::cpu
