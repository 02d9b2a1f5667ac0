// Naive attention, forward and backward: check, allocate, call the kernel.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "cpu/attention.h"
#include "cuda/naive.h"
#include "ops/attention_arguments.h"
#include "ops/devices.h"
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
  NaiveOutputs outputs{attention_view(out), row_view(lse), {}, {}, attention_view(probs)};
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
  if (!query.is_cuda()) {
    cpu::naive_forward(p, outputs);
  } else if constexpr (kWithCuda) {
    const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
    torch::stable::fill_(max_logits, -std::numeric_limits<double>::infinity());
    cuda::naive_forward(p, outputs, query.get_device_index(), TensorWorkspace(query));
  } else {
    built_without_cuda("naive_attention_forward");
  }
  return {out, lse, max_logits, weights, probs};
}

// The terms of a gradient that is a sum over rows, heads or batch entries, on CUDA.
class Terms {
 public:
  // `sizes`: (batch, heads_q, len_q, len_k), or one column. `sum_view`: of `sum`, with size 1 along
  // the dimensions that are added up. Nothing is wanted without a `sum`.
  Terms(const OptionalTensor& sum, const UntypedView4& sum_view, const std::vector<int64_t>& sizes)
      : sum_(sum) {
    if (!sum_) return;
    for (int64_t d = 0; d < 4; ++d) {
      if (sum_view.size[d] == 1 && sizes[d] != 1) dims_.push_back(d);
    }
    memory_ = dims_.empty() ? *sum_ : empty_contiguous(sizes, sum_->scalar_type(), *sum_);
  }

  void* memory() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }

  // torch adds in an order that depends on the sizes alone.
  void add_up() {
    if (dims_.empty()) return;
    const Tensor result = torch::stable::sum(*memory_, dims_, true);
    torch::stable::copy_(*sum_, torch::stable::view(result, sizes_of(*sum_)));
  }

 private:
  OptionalTensor sum_, memory_;
  std::vector<int64_t> dims_;
};

void backward_on_cuda(const AttentionProblem& p, NaiveBackwardInputs inputs, const Tensor& query,
                      const Tensor& probs, const OptionalTensor& grad_weights,
                      const Gradients& gradients) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Tensor contiguous_probs = torch::stable::contiguous(probs);
  inputs.probs = attention_view(contiguous_probs);
  OptionalTensor contiguous_grad;
  if (grad_weights) {
    contiguous_grad = torch::stable::contiguous(*grad_weights);
    inputs.grad_weights = attention_view(*contiguous_grad);
  }
  const BackwardOutputs& outputs = gradients.outputs();
  std::vector<int64_t> sizes = sizes_of(probs);
  const bool has_pairs = p.sequences.storage_k > 0;  // not with head_dim 0 either
  Terms scores(has_pairs ? gradients.mask_sum() : std::nullopt, outputs.grad_mask, sizes);
  sizes.back() = 1;
  Terms alibi(gradients.alibi_sum(), outputs.grad_alibi, sizes);
  Terms sinks(gradients.sinks_sum(), outputs.grad_sinks, sizes);
  cuda::naive_backward(p, inputs, outputs, {scores.memory(), alibi.memory(), sinks.memory()},
                       query.get_device_index(), TensorWorkspace(query));
  for (Terms* terms : {&scores, &alibi, &sinks}) terms->add_up();
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
  NaiveBackwardInputs inputs{
      attention_view(grad_out), {}, {}, attention_view(probs), row_view(lse)};
  if (grad_lse) {
    check_tensor("grad_lse", *grad_lse, row_sizes, real, query);
    inputs.grad_lse = row_view(*grad_lse);
  }
  if (grad_weights) {
    check_tensor("grad_weights", *grad_weights, pair_sizes_of(query, key), dtype, query);
    inputs.grad_weights = attention_view(*grad_weights);
  }
  // On CUDA, products write everything, if there is a row.
  const bool has_rows = lse.numel() > 0;
  const Gradients gradients(query, key, value, attn_mask, options,
                            {wanted[0], wanted[1], wanted[2], wanted[3], wanted[4], wanted[5]},
                            query.is_cuda() && has_rows ? Start::unwritten : Start::zero);
  if (!query.is_cuda()) {
    cpu::naive_backward(p, inputs, gradients.outputs());
  } else if constexpr (kWithCuda) {
    backward_on_cuda(p, inputs, query, probs, grad_weights, gradients);
  } else {
    built_without_cuda("naive_attention_backward");
  }
  return {gradients.query(), gradients.key(),   gradients.value(),
          gradients.mask(),  gradients.alibi(), gradients.sinks()};
}

template <class Library>
void register_naive_attention(Library& library) {
  library.impl("naive_attention_forward", TORCH_BOX(&naive_attention_forward));
  library.impl("naive_attention_backward", TORCH_BOX(&naive_attention_backward));
}

}  // namespace
}  // namespace flashattn::ops

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, library) {
  flashattn::ops::register_naive_attention(library);
}
STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, library) {
  flashattn::ops::register_naive_attention(library);
}
