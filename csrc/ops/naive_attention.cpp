// Naive attention, forward and backward: check, allocate, call the kernel.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/attention.h"
#include "ops/attention_arguments.h"
#include "ops/gradients.h"

namespace flashattn::ops {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::vector<int64_t> pair_sizes_of(const Tensor& query, const Tensor& key) {
  return {query.size(0), query.size(1), query.size(2), key.size(2)};
}

ForwardResult naive_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& key_lengths, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p, bool causal,
    OptionalInt window_left, OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap, bool return_max_logits, bool return_weights) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  const CheckedProblem checked = check_dense(query, key, value, {attn_mask, key_lengths}, options);
  const AttentionProblem& p = checked.problem;
  const ScalarType dtype = query.scalar_type();

  std::vector<int64_t> out_sizes = sizes_of(query);
  out_sizes.back() = p.head_dim_v;
  Tensor out = empty_strided(out_sizes, dense_strides_like(query, out_sizes), dtype, query);
  Tensor lse = empty_contiguous({query.size(0), query.size(1), query.size(2)},
                                accumulator_dtype(dtype), query);
  Tensor probs = empty_contiguous(pair_sizes_of(query, key), dtype, query);
  if (p.head_dim == 0) torch::stable::zero_(probs);  // no kernel writes it
  cpu::NaiveOutputs outputs{attention_view(out), row_view(lse), {}, {}, attention_view(probs)};
  Tensor max_logits = absent_output(ScalarType::Float, query);
  if (return_max_logits) {
    max_logits = empty_contiguous({query.size(0), query.size(1)}, ScalarType::Float, query);
    outputs.max_logits = head_view(max_logits);
  }
  Tensor weights = absent_output(dtype, query);
  if (return_weights) {
    weights = empty_contiguous(pair_sizes_of(query, key), dtype, query);
    if (p.head_dim == 0) torch::stable::zero_(weights);
    outputs.weights = attention_view(weights);
  }
  cpu::naive_forward(p, outputs);
  return {out, lse, max_logits, weights, probs};
}

BackwardResult naive_attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const OptionalTensor& grad_weights,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& probs,
    const Tensor& lse, const std::vector<bool>& wanted, const OptionalTensor& attn_mask,
    const OptionalTensor& key_lengths, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p, bool causal,
    OptionalInt window_left, OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  const CheckedProblem checked = check_dense(query, key, value, {attn_mask, key_lengths}, options);
  const AttentionProblem& p = checked.problem;
  const ScalarType dtype = query.scalar_type(), real = accumulator_dtype(dtype);
  const std::vector<int64_t> row_sizes{query.size(0), query.size(1), query.size(2)};

  std::vector<int64_t> out_sizes = sizes_of(query);
  out_sizes.back() = p.head_dim_v;
  check_tensor("grad_out", grad_out, out_sizes, dtype, query);
  check_tensor("probs", probs, pair_sizes_of(query, key), dtype, query);
  check_tensor("lse", lse, row_sizes, real, query);
  cpu::NaiveBackwardInputs inputs{
      attention_view(grad_out), {}, {}, attention_view(probs), row_view(lse)};
  if (grad_lse) {
    check_tensor("grad_lse", *grad_lse, row_sizes, real, query);
    inputs.grad_lse = row_view(*grad_lse);
  }
  if (grad_weights) {
    check_tensor("grad_weights", *grad_weights, pair_sizes_of(query, key), dtype, query);
    inputs.grad_weights = attention_view(*grad_weights);
  }
  const Gradients gradients(query, key, value, attn_mask, options,
                            {wanted[0], wanted[1], wanted[2], wanted[3], wanted[4], wanted[5]});
  cpu::naive_backward(p, inputs, gradients.outputs());
  return {gradients.query(), gradients.key(),   gradients.value(),
          gradients.mask(),  gradients.alibi(), gradients.sinks()};
}

}  // namespace
}  // namespace flashattn::ops

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, library) {
  using namespace flashattn::ops;
  library.impl("naive_attention_forward", TORCH_BOX(&naive_attention_forward));
  library.impl("naive_attention_backward", TORCH_BOX(&naive_attention_backward));
}
