#include "cpu/softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/scratch.h"
#include "cpu/softmax_kernels.h"
#include "tensors.h"

namespace flashattn::cpu {
namespace {

struct Shape {
  int64_t outer, length, inner;
};

// Rows around a vector, a chunk and several tasks; columns around a group. Empty tensors end at the
// front desk.
const std::initializer_list<Shape> kShapes = {
    {1, 1, 1},    {3, 7, 1},    {5, 64, 1},  {2, 2049, 1},  {70, 1000, 1}, {2, 3, 5},
    {1, 40, 256}, {2, 9, 1025}, {3, 1, 600}, {2, 4097, 19}, {1, 140001, 1}};

struct Types {
  DType input, output;
};
const std::initializer_list<Types> kTypes = {
    {DType::float16, DType::float16},   {DType::float16, DType::float32},
    {DType::bfloat16, DType::bfloat16}, {DType::bfloat16, DType::float32},
    {DType::float32, DType::float32},   {DType::float64, DType::float64}};

double unit(DType dtype) {
  switch (dtype) {
    case DType::float16: return 0x1p-11;
    case DType::bfloat16: return 0x1p-8;
    case DType::float32: return 0x1p-24;
    default: return 0x1p-53;
  }
}

// (1, outer, length, inner); a gap of rows between slabs where the outer stride is larger.
SoftmaxOperand operand(const Tensor& tensor, int64_t length_stride) {
  const UntypedView4 view = tensor.view();
  SoftmaxOperand result;
  result.data = view.data;
  result.dtype = tensor.dtype();
  result.outer.rank = 1;
  result.outer.size[0] = view.size[1];
  result.outer.stride[0] = view.stride[1];
  result.length_stride = length_stride;
  return result;
}

Tensor random_tensor(DType dtype, const Shape& s, double scale, std::mt19937& random) {
  Tensor tensor(dtype, {1, s.outer, s.length, s.inner}, {.offset = 1});
  std::normal_distribution<double> normal;
  tensor.for_each([&](Index4 at) { tensor.set(at, scale * normal(random)); });
  return tensor;
}

// Half of what separates the smallest numbers of a type.
double smallest(DType dtype) { return dtype == DType::float16 ? 0x1p-25 : 1e-40; }

// Calls body with the elements of each row, (length) indices.
template <class Body>
void for_each_row(const Tensor& tensor, const Body& body) {
  for (int64_t o = 0; o < tensor.size()[1]; ++o) {
    for (int64_t c = 0; c < tensor.size()[3]; ++c) {
      std::vector<Index4> row;
      for (int64_t l = 0; l < tensor.size()[2]; ++l) row.push_back({0, o, l, c});
      body(row);
    }
  }
}

// In long double: the reference must be better than fp64.
std::vector<long double> forward_of(SoftmaxKind kind, const Tensor& input,
                                    const std::vector<Index4>& row) {
  long double max = -INFINITY, sum = 0;
  for (const Index4 at : row) max = std::max<long double>(max, input.get(at));
  for (const Index4 at : row) sum += std::exp(input.get(at) - max);
  std::vector<long double> result;
  for (const Index4 at : row) {
    const long double x = input.get(at) - max;
    result.push_back(kind == SoftmaxKind::softmax ? std::exp(x) / sum : x - std::log(sum));
  }
  return result;
}

template <class Body>
void for_every_problem(const Body& body) {
  for (const auto kind : {SoftmaxKind::softmax, SoftmaxKind::log_softmax}) {
    for (const Types types : kTypes) {
      for (const Shape& s : kShapes) {
        SCOPED_TRACE("outer " + std::to_string(s.outer) + " length " + std::to_string(s.length) +
                     " inner " + std::to_string(s.inner) + " type " +
                     std::to_string(static_cast<int>(types.input)));
        body(kind, types, s);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Softmax, ForwardMatchesTheFormula) {
  std::mt19937 random(1);
  for_every_problem([&](SoftmaxKind kind, Types types, Shape s) {
    const Tensor input = random_tensor(types.input, s, 5, random);
    const Tensor output(types.output, input.size());
    softmax_forward({kind,
                     {s.outer, s.length, s.inner},
                     operand(input, s.inner),
                     {output.view().data, types.output}});
    for_each_row(input, [&](const std::vector<Index4>& row) {
      const auto expected = forward_of(kind, input, row);
      double max = -INFINITY;
      for (const Index4 at : row) max = std::max(max, input.get(at));
      for (size_t i = 0; i < row.size(); ++i) {
        // x - max is rounded before the exponential.
        const double relative =
            unit(types.output) + unit(accumulator_of(types.input)) * (16 + max - input.get(row[i]));
        // A logarithm's error is that of the sum, whatever the size of the result.
        const long double scale = kind == SoftmaxKind::log_softmax ? 10 : 0;
        ASSERT_NEAR(output.get(row[i]), expected[i],
                    relative * (scale + std::fabs(expected[i])) + smallest(types.output));
      }
    });
  });
}

TEST(Softmax, BackwardMatchesTheFormula) {
  std::mt19937 random(2);
  for_every_problem([&](SoftmaxKind kind, Types types, Shape s) {
    const bool log = kind == SoftmaxKind::log_softmax;
    const Tensor grad = random_tensor(types.output, s, 1, random);
    const Tensor input = random_tensor(types.input, s, 1, random);
    Tensor output(types.output, input.size(), {.offset = 2});
    for_each_row(input, [&](const std::vector<Index4>& row) {
      const auto values = forward_of(kind, input, row);
      for (size_t i = 0; i < row.size(); ++i) output.set(row[i], static_cast<double>(values[i]));
    });
    const Tensor result(types.input, input.size());
    softmax_backward({kind,
                      {s.outer, s.length, s.inner},
                      operand(grad, s.inner),
                      operand(output, s.inner),
                      {result.view().data, types.input}});
    const double relative = unit(types.input) + 64 * unit(accumulator_of(types.input));
    for_each_row(input, [&](const std::vector<Index4>& row) {
      long double sum = 0, magnitude = 1;
      for (const Index4 at : row) {
        const long double term = grad.get(at) * (log ? 1.0L : output.get(at));
        sum += term;
        magnitude += std::fabs(term);
      }
      for (const Index4 at : row) {
        const long double p = log ? std::exp(static_cast<long double>(output.get(at)))
                                  : static_cast<long double>(output.get(at));
        const long double expected = log ? grad.get(at) - p * sum : (grad.get(at) - sum) * p;
        ASSERT_NEAR(result.get(at), expected,
                    relative * (magnitude * p + std::fabs(expected)) + smallest(types.input));
      }
    });
  });
}

// Results that begin at every place of a vector, in poisoned memory.
template <class Element>
struct PlacedLines {
  static constexpr int64_t kPad = 64;
  PlacedLines(int64_t lines, int64_t stride, int64_t offset)
      : size(lines * stride + 2 * kPad), memory(size), first(memory.data() + kPad + offset) {
    std::memset(memory.data(), kPoison, bytes());
  }
  size_t bytes() const { return static_cast<size_t>(size) * sizeof(Element); }
  bool same_as(const PlacedLines& other) const {
    return std::memcmp(memory.data(), other.memory.data(), bytes()) == 0;
  }

  int64_t size;
  Buffer<Element> memory;  // aligned to a cache line
  Element* first;
};

template <class Input, class Output>
void results_past_the_caches_are_the_same(const SoftmaxKernels<Input, Output>& kernels) {
  constexpr int64_t kMost = 4100;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  const Buffer<Accumulator<Input>> terms(kMostSoftmaxTerms);
  std::vector<Input> input(kMost);
  std::vector<Output> grad(kMost), output(kMost);
  for (auto& x : input) x = convert<Input>(static_cast<float>(normal(random)));
  for (auto& x : grad) x = convert<Output>(static_cast<float>(normal(random)));
  for (auto& x : output) x = convert<Output>(static_cast<float>(normal(random)));

  struct Block {
    int64_t lines, width;
  };
  for (const auto kind : {SoftmaxKind::softmax, SoftmaxKind::log_softmax}) {
    for (const auto [lines, width] : {Block{19, 5}, {18, 16}, {17, 67}, {4, 1025}, {37, 97}}) {
      for (const int64_t offset : {0, 1, 3, 8}) {
        SCOPED_TRACE(std::to_string(lines) + " x " + std::to_string(width) + " at " +
                     std::to_string(offset));
        const SoftmaxFormula formula{kind};
        const auto expect_same = [&](auto element, const auto& call) {
          PlacedLines<decltype(element)> cached(lines, width, offset),
              streamed = {lines, width, offset};
          call(ResultLines<decltype(element)>{cached.first, width, false});
          call(ResultLines<decltype(element)>{streamed.first, width, true});
          EXPECT_TRUE(streamed.same_as(cached));
        };
        const int64_t columns = std::min(width, kMostSoftmaxColumns);
        expect_same(Output(), [&](auto to) {
          kernels.forward_rows(formula, {input.data(), width}, lines, width, to, terms.data());
        });
        expect_same(Output(), [&](auto to) {
          kernels.forward_columns(formula, {input.data(), width}, lines, columns, to, terms.data());
        });
        expect_same(Input(), [&](auto to) {
          kernels.backward_rows(formula, {grad.data(), width}, {output.data(), width}, lines, width,
                                to);
        });
        expect_same(Input(), [&](auto to) {
          kernels.backward_columns(formula, {grad.data(), width}, {output.data(), width}, lines,
                                   columns, to);
        });
      }
    }
  }
}

TEST(Softmax, ResultsPastTheCachesAreTheSame) {
  std::apply([](const auto&... kernels) { (results_past_the_caches_are_the_same(kernels), ...); },
             softmax_set());
}

// As torch: a row of -inf, and one with NaN or +inf, is NaN; -inf beside a number is 0.
TEST(Softmax, SpecialValues) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const int64_t inner : {1, 3}) {
    for (const int64_t length : {3, 40}) {
      for (const double special : {-kInfinity, kInfinity, std::nan("")}) {
        for (const bool everywhere : {false, true}) {
          Tensor input(DType::float32, {1, 1, length, inner});
          input.fill(everywhere ? special : 1.0);
          for (int64_t c = 0; c < inner; ++c) input.set({0, 0, 1, c}, special);
          const Tensor output(DType::float32, input.size());
          softmax_forward({SoftmaxKind::softmax,
                           {1, length, inner},
                           operand(input, inner),
                           {output.view().data, DType::float32}});
          const bool is_nan = everywhere || special != -kInfinity;
          output.for_each([&](Index4 at) {
            EXPECT_EQ(std::isnan(output.get(at)), is_nan) << special << ' ' << at[2];
          });
          if (!is_nan) {
            EXPECT_EQ(output.get({0, 0, 1, 0}), 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
