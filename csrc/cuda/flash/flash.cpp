// Chooses a family for a flash attention problem; the one family so far is the portable one.
#include "cuda/flash.h"

#include <algorithm>

#include "cuda/flash/portable/launch.h"

namespace flashattn::cuda {
namespace {

// Calls function with a value of the dtype's element type.
template <class Function>
void with_element(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float16: return function(float16{});
    case DType::bfloat16: return function(bfloat16{});
    case DType::float32: return function(float{});
    case DType::float64: return function(double{});
    case DType::boolean: return;  // never an input of attention
  }
}

int element_size(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

}  // namespace

void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs, int device) {
  const OpScope scope("flash_attention_forward", device);
  const int size = element_size(problem.dtype);
  ForwardArguments arguments{};
  arguments.problem = problem;
  arguments.outputs = outputs;
  arguments.chunked_query = is_chunked(problem.query, size);
  arguments.chunked_key = is_chunked(problem.key, size);
  arguments.chunked_value = is_chunked(problem.value, size);
  arguments.paired_out = is_chunked(outputs.out, size);
  with_element(problem.dtype, [&](auto element) {
    portable::launch_forward<decltype(element)>(scope, arguments);
  });
}

void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs, int device, const Workspace& workspace) {
  const OpScope scope("flash_attention_backward", device);
  const int size = element_size(problem.dtype);
  BackwardArguments arguments{};
  arguments.problem = problem;
  arguments.inputs = inputs;
  arguments.outputs = outputs;
  arguments.chunked_query = is_chunked(problem.query, size);
  arguments.chunked_key = is_chunked(problem.key, size);
  arguments.chunked_value = is_chunked(problem.value, size);
  arguments.chunked_grad_out = is_chunked(inputs.grad_out, size);

  // One piece of memory: the row terms, laid out like lse, then the partial sums.
  const Sequences& s = problem.sequences;
  const int64_t real = problem.dtype == DType::float64 ? 8 : 4;
  const int64_t rows = (s.packed() ? 1 : s.count) * problem.heads_q * s.storage_q;
  const int64_t partials = s.count * problem.heads_q * portable::partial_sum_parts(problem);
  char* memory = static_cast<char*>(workspace(real * (rows + 2 * partials)));
  UntypedView4& deltas = arguments.deltas;
  deltas.data = memory;
  deltas.stride[2] = 1;
  deltas.stride[1] = s.storage_q;
  deltas.stride[0] = s.packed() ? 0 : problem.heads_q * s.storage_q;
  if (outputs.grad_sinks) arguments.partial_sinks = memory + real * rows;
  if (outputs.grad_alibi) arguments.partial_alibi = memory + real * (rows + partials);
  with_element(problem.dtype, [&](auto element) {
    portable::launch_backward<decltype(element)>(scope, arguments);
  });
}

int64_t portable::partial_sum_parts(const AttentionProblem& problem) {
  constexpr int64_t kFewestRows = 32;  // of a row tile, over all kernels
  return divide_up(problem.sequences.max_len_q, kFewestRows);
}

}  // namespace flashattn::cuda
