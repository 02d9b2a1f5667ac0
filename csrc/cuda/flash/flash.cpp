// Chooses a family for a flash attention problem; the one family so far is the portable one.
#include "cuda/flash.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/flash/mask_summary.h"
#include "cuda/flash/portable/launch.h"

namespace flashattn::cuda {
namespace {

bool is_chunked(const UntypedView4& view, DType dtype) {
  const int size = size_of(dtype);
  return cuda::is_chunked(view, size, 16 / size);
}

Chunked chunked_of(const AttentionProblem& p) {
  Chunked chunked;
  chunked.query = is_chunked(p.query, p.dtype);
  chunked.key = is_chunked(p.key, p.dtype);
  chunked.value = is_chunked(p.value, p.dtype);
  if (p.attn_mask) {
    chunked.mask = is_chunked(p.attn_mask.view, p.attn_mask.dtype);
    constexpr int kPiece = 8;  // see attend/bias.cuh
    const int size = size_of(p.attn_mask.dtype);
    chunked.bias = cuda::is_chunked(p.attn_mask.view, size, kPiece, std::min(kPiece * size, 16));
  }
  return chunked;
}

// Finds out what the mask hides, before the kernels.
MaskSummary summary_of(const OpScope& scope, const AttentionProblem& p, bool chunked,
                       const Workspace& workspace) {
  if (!p.attn_mask) return {};
  MaskSummary summary(p.attn_mask);
  summary.cells = static_cast<uint8_t*>(workspace(MaskSummary::count(p.attn_mask)));
  summarise_mask(scope, p.attn_mask, chunked, summary);
  return summary;
}

// The kernels count positions inside a sequence in 32 bits, with room for windows around them.
void check_lengths(const OpScope& scope, const AttentionProblem& p) {
  const int64_t longest = std::max(p.sequences.max_len_q, p.sequences.max_len_k);
  if (longest >= kUnlimitedOf<int>) {
    throw std::runtime_error(
        std::string("flashattn_ext::") + scope.op() + ": expected sequences shorter than " +
        std::to_string(kUnlimitedOf<int>) + " on CUDA, got length " + std::to_string(longest));
  }
}

}  // namespace

void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs, int device,
                   const Workspace& workspace) {
  const OpScope scope("flash_attention_forward", device);
  check_lengths(scope, problem);
  ForwardArguments arguments{};
  arguments.problem = problem;
  arguments.outputs = outputs;
  arguments.chunked = chunked_of(problem);
  arguments.chunked.out = is_chunked(outputs.out, problem.dtype) &&
                          (!outputs.out_low || is_chunked(outputs.out_low, problem.dtype));
  arguments.mask_summary = summary_of(scope, problem, arguments.chunked.mask, workspace);
  with_element(problem.dtype, [&](auto element) {
    portable::launch_forward<decltype(element)>(scope, arguments, workspace);
  });
}

void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs, bool deterministic, int device,
                    const Workspace& workspace) {
  const OpScope scope("flash_attention_backward", device);
  check_lengths(scope, problem);
  BackwardArguments arguments{};
  arguments.problem = problem;
  arguments.inputs = inputs;
  arguments.outputs = outputs;
  arguments.deterministic = deterministic;
  Chunked& chunked = arguments.chunked;
  chunked = chunked_of(problem);
  chunked.grad_out = is_chunked(inputs.grad_out, problem.dtype);
  chunked.out = is_chunked(inputs.out, problem.dtype) &&
                (!inputs.out_low || is_chunked(inputs.out_low, problem.dtype));
  chunked.grad_query = outputs.grad_query && is_chunked(outputs.grad_query, problem.dtype);
  chunked.grad_key = outputs.grad_key && is_chunked(outputs.grad_key, problem.dtype);
  chunked.grad_value = outputs.grad_value && is_chunked(outputs.grad_value, problem.dtype);

  arguments.mask_summary = summary_of(scope, problem, chunked.mask, workspace);

  // The row terms, and a part of the sinks' gradient of every row tile.
  arguments.padded = PaddedRows::of(problem);
  const int64_t real = problem.dtype == DType::float64 ? 8 : 4;
  const int64_t rows = arguments.padded.count(problem);
  const int64_t parts = problem.sequences.count * problem.heads_q *
                        divide_up(problem.sequences.max_len_q, kPaddedRows);
  char* const memory =
      static_cast<char*>(workspace(real * (3 * rows + (outputs.grad_sinks ? parts : 0))));
  arguments.lse_high = memory;
  arguments.lse_low = memory + real * rows;
  arguments.deltas = memory + real * 2 * rows;
  if (outputs.grad_sinks) arguments.partial_sinks = memory + real * 3 * rows;
  with_element(problem.dtype, [&](auto element) {
    portable::launch_backward<decltype(element)>(scope, arguments, workspace);
  });
}

}  // namespace flashattn::cuda
