// Each instruction set that this processor has, for the tests of the microkernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/microkernel_tables.h"
#include "cpu/microkernels.h"

namespace flashattn::cpu {

// The tables of one (element, operand) pair, by the name of their instruction set.
template <class Element, class Operand>
struct Named {
  const char* name;
  const Microkernels<Element, Operand>& kernels;
};

template <class Element, class Operand = Accumulator<Element>>
std::vector<Named<Element, Operand>> tables() {
  std::vector<Named<Element, Operand>> result;
  for (const InstructionSet& set : instruction_sets()) {
    if (!set.supported()) continue;
    if constexpr (std::is_same_v<Operand, bfloat16>) {
      if (set.bfloat16_products) result.push_back({set.name, *set.bfloat16_products});
    } else if constexpr (std::is_same_v<Element, float>) {
      result.push_back({set.name, set.kernels->for_float});
    } else if constexpr (std::is_same_v<Element, float16>) {
      result.push_back({set.name, set.kernels->for_float16});
    } else if constexpr (std::is_same_v<Element, bfloat16>) {
      result.push_back({set.name, set.kernels->for_bfloat16});
    } else {
      result.push_back({set.name, set.kernels->for_double});
    }
  }
  return result;
}

template <class Pair>
struct Microkernel : testing::Test {
  using Element = typename Pair::first_type;
  using Operand = typename Pair::second_type;
  using Real = Accumulator<Element>;
  static constexpr int kPair = sizeof(Operand) == 2 ? 2 : 1;
  static constexpr Real kEpsilon = std::numeric_limits<Real>::epsilon();

  std::mt19937 random{3};
  template <class T>
  std::vector<T> normal(int64_t count) {
    std::normal_distribution<double> distribution;
    std::vector<T> result(static_cast<size_t>(std::max<int64_t>(count, 0)));
    for (T& x : result) x = convert<T>(distribution(random));
    return result;
  }
  // What an operand holds of an element.
  static double as_operand(Element element) { return convert<double>(convert<Operand>(element)); }

  // The element of a packed right operand (depth, columns).
  static double right(const std::vector<Operand>& b, int64_t stride, int64_t depth,
                      int64_t column) {
    return convert<double>(b[(depth / kPair * stride + column) * kPair + depth % kPair]);
  }
};

using Pairs =
    testing::Types<std::pair<float, float>, std::pair<double, double>, std::pair<float16, float>,
                   std::pair<bfloat16, float>, std::pair<bfloat16, bfloat16>>;
TYPED_TEST_SUITE(Microkernel, Pairs);

// A matrix inside a larger array: contiguous, or with a gap between neighbours.
template <class Element>
struct Source {
  std::vector<Element> memory;
  StridedMatrix<const Element> matrix;

  Source(std::vector<Element> elements, int64_t rows, int64_t columns, int64_t column_stride)
      : memory(std::move(elements)),
        matrix{memory.data(), (columns + 3) * column_stride, column_stride, rows, columns} {}
  static int64_t size(int64_t rows, int64_t columns, int64_t column_stride) {
    return rows > 0 && columns > 0
               ? (rows - 1) * (columns + 3) * column_stride + (columns - 1) * column_stride + 1
               : 0;
  }
  Element at(int64_t row, int64_t column) const {
    return matrix.data[row * matrix.row_stride + column * matrix.column_stride];
  }
};

}  // namespace flashattn::cpu
