// Rows, and groups of adjacent columns, handed out as tasks; the kernels of the instruction set
// work on them (vector/softmax.h).
#include "cpu/softmax.h"

#include <algorithm>
#include <tuple>

#include "core/tile_schedule.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/softmax_kernels.h"

namespace flashattn::cpu {
namespace {

// Elements of a task. Smaller ones cost more to hand out than to do; of larger ones each thread
// reads on where it has read, but some threads may get none.
int64_t elements_of_task(const SoftmaxShape& shape) {
  constexpr int64_t kFewest = 1 << 15, kMost = 1 << 17;
  const int64_t elements = shape.outer * shape.length * shape.inner;
  return std::clamp(elements / (4 * max_threads()), kFewest, kMost);
}

// Results that the caches would not keep until somebody reads them go past them.
bool past_caches(const SoftmaxShape& shape, int64_t bytes_per_element) {
  constexpr int64_t kCacheBytes = 16 << 20;  // of the last level, the share of a few threads
  return shape.outer * shape.length * shape.inner * bytes_per_element > kCacheBytes;
}

// Adjacent columns that are taken together: many, since they are read as they lie, but so few that
// what is read twice stays in the cache, and a task for every thread. Never a part of a cache line.
int64_t columns_together(const SoftmaxShape& shape, int operands) {
  constexpr int64_t kFewest = kFewestSoftmaxColumns;
  const int64_t cached = kMostSoftmaxTerms / (operands * shape.length) / kFewest * kFewest;
  int64_t columns = std::min(shape.inner, kMostSoftmaxColumns);
  if (cached > 0) columns = std::min(columns, cached);
  while (columns > kFewest && shape.outer * divide_up(shape.inner, columns) < 2 * max_threads()) {
    columns = std::max(kFewest, divide_up(columns, 2 * kFewest) * kFewest);
  }
  return columns;
}

// Room for the terms of `length` lines of `width` elements, whole cache lines of each.
template <class Real>
Buffer<Real> room_for_terms(int64_t length, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(Real);
  return Buffer<Real>(std::min(kMostSoftmaxTerms, length * divide_up(width, kLine) * kLine));
}

// Calls body(slab, column, width, terms) for every group of adjacent columns. Several small groups
// make one task.
template <class Real, class Body>
void for_each_group(const SoftmaxShape& shape, int operands, const Body& body) {
  const int64_t columns = columns_together(shape, operands);
  const int64_t groups_per_slab = divide_up(shape.inner, columns);
  const int64_t per_task = std::max<int64_t>(1, elements_of_task(shape) / (shape.length * columns));
  const Tiles tasks{{0, shape.outer * groups_per_slab}, per_task};
  const auto room = [&] { return room_for_terms<Real>(shape.length, columns); };
  parallel_for_each(tasks.count(), room, [&](int64_t task, const Buffer<Real>& terms) {
    const Range groups = tasks[task];
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const int64_t column = group % groups_per_slab * columns;
      body(group / groups_per_slab, column, std::min(columns, shape.inner - column), terms.data());
    }
  });
}

// How many of `rows` rows from `first` on are evenly spaced.
int64_t evenly_spaced(const OuterLayout& outer, int64_t first, int64_t rows) {
  const int64_t size = outer.size[outer.rank - 1];
  return std::min(rows, size - first % size);
}

// Calls body(first, rows, terms) for runs of rows that all of the tensors hold evenly spaced.
template <class Real, class Body>
void for_each_run(const SoftmaxShape& shape, const OuterLayout& a, const OuterLayout& b,
                  const Body& body) {
  const Tiles tasks{{0, shape.outer}, std::max<int64_t>(1, elements_of_task(shape) / shape.length)};
  const auto room = [&] { return room_for_terms<Real>(1, shape.length); };
  parallel_for_each(tasks.count(), room, [&](int64_t task, const Buffer<Real>& terms) {
    const Range rows = tasks[task];
    for (int64_t first = rows.begin; first < rows.end;) {
      const int64_t run = evenly_spaced(b, first, evenly_spaced(a, first, rows.end - first));
      body(first, run, terms.data());
      first += run;
    }
  });
}

template <class Element>
Lines<const Element> rows_of(const SoftmaxOperand& operand, int64_t first) {
  const auto* data = static_cast<const Element*>(operand.data);
  return {data + operand.outer.offset(first), operand.outer.stride[operand.outer.rank - 1]};
}

template <class Element>
ResultLines<Element> rows_of(const SoftmaxResult& result, const SoftmaxShape& shape, int64_t first,
                             bool past_caches) {
  return {static_cast<Element*>(result.data) + first * shape.length, shape.length, past_caches};
}

template <class Element>
Lines<const Element> columns_of(const SoftmaxOperand& operand, int64_t slab, int64_t column) {
  const auto* data = static_cast<const Element*>(operand.data);
  return {data + operand.outer.offset(slab) + column, operand.length_stride};
}

template <class Element>
ResultLines<Element> columns_of(const SoftmaxResult& result, const SoftmaxShape& shape,
                                int64_t slab, int64_t column, bool past_caches) {
  auto* data = static_cast<Element*>(result.data);
  return {data + slab * shape.length * shape.inner + column, shape.inner, past_caches};
}

template <class In, class Out>
void forward(const SoftmaxForwardProblem& p) {
  using Real = Accumulator<In>;
  const SoftmaxFormula formula{p.kind};
  const auto& kernels = std::get<SoftmaxKernels<In, Out>>(softmax_set());
  const bool streams = past_caches(p.shape, sizeof(In) + sizeof(Out));
  if (p.shape.inner == 1) {
    for_each_run<Real>(
        p.shape, p.input.outer, p.input.outer, [&](int64_t first, int64_t rows, Real* terms) {
          kernels.forward_rows(formula, rows_of<In>(p.input, first), rows, p.shape.length,
                               rows_of<Out>(p.output, p.shape, first, streams), terms);
        });
  } else {
    for_each_group<Real>(p.shape, 1, [&](int64_t slab, int64_t column, int64_t width, Real* terms) {
      kernels.forward_columns(formula, columns_of<In>(p.input, slab, column), p.shape.length, width,
                              columns_of<Out>(p.output, p.shape, slab, column, streams), terms);
    });
  }
}

template <class In, class Out>
void backward(const SoftmaxBackwardProblem& p) {
  using Real = Accumulator<In>;
  const SoftmaxFormula formula{p.kind};
  const auto& kernels = std::get<SoftmaxKernels<Out, In>>(softmax_set());
  const bool streams = past_caches(p.shape, 2 * sizeof(In) + sizeof(Out));
  if (p.shape.inner == 1) {
    for_each_run<Real>(p.shape, p.grad_output.outer, p.output.outer,
                       [&](int64_t first, int64_t rows, Real*) {
                         kernels.backward_rows(formula, rows_of<In>(p.grad_output, first),
                                               rows_of<In>(p.output, first), rows, p.shape.length,
                                               rows_of<Out>(p.grad_input, p.shape, first, streams));
                       });
  } else {
    for_each_group<Real>(p.shape, 2, [&](int64_t slab, int64_t column, int64_t width, Real*) {
      kernels.backward_columns(formula, columns_of<In>(p.grad_output, slab, column),
                               columns_of<In>(p.output, slab, column), p.shape.length, width,
                               columns_of<Out>(p.grad_input, p.shape, slab, column, streams));
    });
  }
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
