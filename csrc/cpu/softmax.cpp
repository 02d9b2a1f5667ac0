// A row, or a line across many columns, is taken through fp32 (fp64) scratch in chunks that stay in
// the nearest cache; the microkernels work on the chunks.
#include "cpu/softmax.h"

#include <algorithm>

#include "core/constants.h"
#include "core/softmax_formula.h"
#include "core/tile_schedule.h"
#include "cpu/microkernels.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kChunk = 2048;            // elements of a row in scratch at a time
constexpr int64_t kColumns = 256;           // columns reduced together where inner > 1
constexpr int64_t kTaskElements = 1 << 15;  // smaller tasks cost more to hand out than to do

template <class Real, class Element>
void load_chunk(const Element* from, int64_t count, Real* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = convert<Real>(from[i]);
}

// Independent sums let the compiler use SIMD: it may not reorder a floating-point sum by itself.
template <class Real, class Summand>
Real sum_of(int64_t count, const Summand& summand) {
  constexpr int64_t kLanes = 16;
  Real lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += summand(i + lane);
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) lanes[lane] += summand(i);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Calls body(begin, count) for each chunk of a row. A row of one chunk stays in scratch from pass
// to pass.
template <class Body>
void for_each_chunk(int64_t length, const Body& body) {
  for (int64_t begin = 0; begin < length; begin += kChunk) {
    body(begin, std::min(kChunk, length - begin));
  }
}

template <class In, class Out>
void forward_row(SoftmaxFormula formula, const In* input, int64_t length, Out* output) {
  using Real = Accumulator<In>;
  const Microkernels<Real>& kernels = microkernels<Real>();
  Real chunk[kChunk];

  Real max = kNegativeInfinity<Real>;
  for_each_chunk(length, [&](int64_t begin, int64_t count) {
    load_chunk(input + begin, count, chunk);
    max = std::max(max, kernels.row_max(chunk, count));
  });
  Real sum = 0;
  for_each_chunk(length, [&](int64_t begin, int64_t count) {
    if (length > kChunk) load_chunk(input + begin, count, chunk);
    sum += kernels.exp_row(chunk, count, max, Real(0));
  });
  const Real normaliser = formula.normaliser(sum);
  for_each_chunk(length, [&](int64_t begin, int64_t count) {
    const bool has_exponentials = length <= kChunk && !formula.is_log();
    if (!has_exponentials) {
      load_chunk(input + begin, count, chunk);
      if (formula.is_log()) {
        for (int64_t i = 0; i < count; ++i) chunk[i] -= max;
      } else {
        kernels.exp_row(chunk, count, max, Real(0));
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      output[begin + i] = convert<Out>(formula.value(chunk[i], normaliser));
    }
  });
}

template <class In, class Out>
void backward_row(SoftmaxFormula formula, const In* grad_output, const In* output, int64_t length,
                  Out* grad_input) {
  using Real = Accumulator<In>;
  const Microkernels<Real>& kernels = microkernels<Real>();
  Real grad[kChunk], probability[kChunk];
  const auto load = [&](int64_t begin, int64_t count) {
    load_chunk(grad_output + begin, count, grad);
    load_chunk(output + begin, count, probability);
  };

  Real sum = 0;
  for_each_chunk(length, [&](int64_t begin, int64_t count) {
    load(begin, count);
    sum += sum_of<Real>(count, [&](int64_t i) { return formula.summand(grad[i], probability[i]); });
  });
  for_each_chunk(length, [&](int64_t begin, int64_t count) {
    if (length > kChunk) load(begin, count);
    if (formula.is_log()) kernels.exp_row(probability, count, Real(0), Real(0));
    for (int64_t i = 0; i < count; ++i) {
      grad_input[begin + i] = convert<Out>(formula.gradient(grad[i], probability[i], sum));
    }
  });
}

// Adjacent columns of one slab: element l of column c at data + l * stride + c.
template <class Element>
struct Columns {
  Element* data;
  int64_t stride;
  Element* line(int64_t l) const { return data + l * stride; }
};

template <class In, class Out>
void forward_columns(SoftmaxFormula formula, Columns<const In> input, int64_t length, int64_t width,
                     Columns<Out> output) {
  using Real = Accumulator<In>;
  const Microkernels<Real>& kernels = microkernels<Real>();
  Real max[kColumns], normaliser[kColumns], line[kColumns];

  std::fill_n(max, width, kNegativeInfinity<Real>);
  for (int64_t l = 0; l < length; ++l) {
    load_chunk(input.line(l), width, line);
    for (int64_t c = 0; c < width; ++c) max[c] = line[c] > max[c] ? line[c] : max[c];
  }
  std::fill_n(normaliser, width, Real(0));
  for (int64_t l = 0; l < length; ++l) {
    load_chunk(input.line(l), width, line);
    for (int64_t c = 0; c < width; ++c) line[c] -= max[c];
    kernels.exp_row(line, width, Real(0), Real(0));
    for (int64_t c = 0; c < width; ++c) normaliser[c] += line[c];
  }
  for (int64_t c = 0; c < width; ++c) normaliser[c] = formula.normaliser(normaliser[c]);
  for (int64_t l = 0; l < length; ++l) {
    load_chunk(input.line(l), width, line);
    for (int64_t c = 0; c < width; ++c) line[c] -= max[c];
    if (!formula.is_log()) kernels.exp_row(line, width, Real(0), Real(0));
    Out* result = output.line(l);
    for (int64_t c = 0; c < width; ++c) {
      result[c] = convert<Out>(formula.value(line[c], normaliser[c]));
    }
  }
}

template <class In, class Out>
void backward_columns(SoftmaxFormula formula, Columns<const In> grad_output,
                      Columns<const In> output, int64_t length, int64_t width,
                      Columns<Out> grad_input) {
  using Real = Accumulator<In>;
  const Microkernels<Real>& kernels = microkernels<Real>();
  Real sum[kColumns], grad[kColumns], probability[kColumns];
  const auto load = [&](int64_t l) {
    load_chunk(grad_output.line(l), width, grad);
    load_chunk(output.line(l), width, probability);
  };

  std::fill_n(sum, width, Real(0));
  for (int64_t l = 0; l < length; ++l) {
    load(l);
    for (int64_t c = 0; c < width; ++c) sum[c] += formula.summand(grad[c], probability[c]);
  }
  for (int64_t l = 0; l < length; ++l) {
    load(l);
    if (formula.is_log()) kernels.exp_row(probability, width, Real(0), Real(0));
    Out* result = grad_input.line(l);
    for (int64_t c = 0; c < width; ++c) {
      result[c] = convert<Out>(formula.gradient(grad[c], probability[c], sum[c]));
    }
  }
}

// Calls body(slab, column, width) for every group of adjacent columns; with inner == 1 a group is
// one row. Several small groups make one task.
template <class Body>
void for_each_group(const SoftmaxShape& shape, const Body& body) {
  const int64_t columns = std::min(shape.inner, kColumns);
  const int64_t groups_per_slab = divide_up(shape.inner, columns);
  const int64_t per_task = std::max<int64_t>(1, kTaskElements / (shape.length * columns));
  const Tiles tasks{{0, shape.outer * groups_per_slab}, per_task};
  parallel_for_each(tasks.count(), [&](int64_t task) {
    const Range groups = tasks[task];
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const int64_t column = group % groups_per_slab * columns;
      body(group / groups_per_slab, column, std::min(columns, shape.inner - column));
    }
  });
}

template <class Element>
Columns<const Element> columns_of(const SoftmaxOperand& operand, int64_t slab, int64_t column) {
  const auto* data = static_cast<const Element*>(operand.data);
  return {data + operand.outer.offset(slab) + column, operand.length_stride};
}

template <class Element>
Columns<Element> columns_of(const SoftmaxResult& result, const SoftmaxShape& shape, int64_t slab,
                            int64_t column) {
  auto* data = static_cast<Element*>(result.data);
  return {data + slab * shape.length * shape.inner + column, shape.inner};
}

template <class In, class Out>
void forward(const SoftmaxForwardProblem& problem) {
  const SoftmaxShape& shape = problem.shape;
  const SoftmaxFormula formula{problem.kind};
  for_each_group(shape, [&](int64_t slab, int64_t column, int64_t width) {
    const auto input = columns_of<In>(problem.input, slab, column);
    const auto output = columns_of<Out>(problem.output, shape, slab, column);
    if (shape.inner == 1) {
      forward_row(formula, input.data, shape.length, output.data);
    } else {
      forward_columns(formula, input, shape.length, width, output);
    }
  });
}

template <class In, class Out>
void backward(const SoftmaxBackwardProblem& problem) {
  const SoftmaxShape& shape = problem.shape;
  const SoftmaxFormula formula{problem.kind};
  for_each_group(shape, [&](int64_t slab, int64_t column, int64_t width) {
    const auto grad_output = columns_of<In>(problem.grad_output, slab, column);
    const auto output = columns_of<In>(problem.output, slab, column);
    const auto grad_input = columns_of<Out>(problem.grad_input, shape, slab, column);
    if (shape.inner == 1) {
      backward_row(formula, grad_output.data, output.data, shape.length, grad_input.data);
    } else {
      backward_columns(formula, grad_output, output, shape.length, width, grad_input);
    }
  });
}

}  // namespace

void softmax_forward(const SoftmaxForwardProblem& problem) {
  with_softmax_forward_types(
      problem.input.dtype, problem.output.dtype,
      [&]<class In, class Out>(TypePair<In, Out>) { forward<In, Out>(problem); });
}

void softmax_backward(const SoftmaxBackwardProblem& problem) {
  with_softmax_backward_types(
      problem.output.dtype, problem.grad_input.dtype,
      [&]<class In, class Out>(TypePair<In, Out>) { backward<In, Out>(problem); });
}

}  // namespace flashattn::cpu
