// Flash attention, dense and packed, forward and backward: check, allocate, call the kernel.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "cpu/attention.h"
#include "cuda/flash.h"
#include "ops/attention_arguments.h"
#include "ops/devices.h"
#include "ops/gradients.h"

namespace flashattn::ops {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using DenseGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using PackedGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

std::vector<int64_t> out_sizes_of(const AttentionProblem& p, const Tensor& query) {
  std::vector<int64_t> sizes = sizes_of(query);
  sizes.back() = p.head_dim_v;
  return sizes;
}

// Shape of lse: (batch, heads_q, len_q), packed (heads_q, total_q).
std::vector<int64_t> row_sizes_of(const AttentionProblem& p) {
  const Sequences& s = p.sequences;
  if (s.packed()) return {p.heads_q, s.storage_q};
  return {s.count, p.heads_q, s.storage_q};
}

ForwardResult forward(const CheckedProblem& checked, const Tensor& query, bool return_max_logits,
                      bool return_low) {
  const AttentionProblem& p = checked.problem;
  const ScalarType real = accumulator_dtype(query.scalar_type());
  const ScalarType dtype = query.scalar_type();
  const std::vector<int64_t> out_sizes = out_sizes_of(p, query);
  const std::vector<int64_t> out_strides = dense_strides_like(query, out_sizes);
  Tensor out = empty_strided(out_sizes, out_strides, dtype, query);
  Tensor lse = empty_contiguous(row_sizes_of(p), real, query);
  Tensor max_logits = absent_output(ScalarType::Float, query);
  Tensor out_low = absent_output(dtype, query), lse_low = absent_output(real, query);
  ForwardOutputs outputs{attention_view(out), row_view(lse), {}, {}, {}};
  if (return_low && dtype != real) {
    out_low = empty_strided(out_sizes, out_strides, dtype, query);
    outputs.out_low = attention_view(out_low);
  }
  if (return_low) {
    lse_low = empty_contiguous(row_sizes_of(p), real, query);
    outputs.lse_low = row_view(lse_low);
  }
  if (p.sequences.packed()) {  // rows that belong to no sequence
    fill_with_zeros(out);
    fill_with_zeros(out_low);
    fill_with_zeros(lse_low);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  if (return_max_logits) {
    max_logits = empty_contiguous({p.sequences.count, p.heads_q}, ScalarType::Float, query);
    outputs.max_logits = head_view(max_logits);
  }
  if (!query.is_cuda()) {
    cpu::flash_forward(p, outputs);
  } else if constexpr (kWithCuda) {
    torch::stable::fill_(max_logits, -std::numeric_limits<double>::infinity());
    cuda::flash_forward(p, outputs, query.get_device_index(), TensorWorkspace(query));
  } else {
    built_without_cuda("flash_attention_forward");
  }
  return {out, lse, max_logits, out_low, lse_low};
}

void backward(const CheckedProblem& checked, const Tensor& query, const Tensor& grad_out,
              const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
              const OptionalTensor& out_low, const OptionalTensor& lse_low,
              std::optional<bool> deterministic, const Gradients& gradients) {
  const AttentionProblem& p = checked.problem;
  const ScalarType real = accumulator_dtype(query.scalar_type());
  check_tensor("grad_out", grad_out, out_sizes_of(p, query), query.scalar_type(), query);
  check_tensor("out", out, out_sizes_of(p, query), query.scalar_type(), query);
  check_tensor("lse", lse, row_sizes_of(p), real, query);
  BackwardInputs inputs{attention_view(grad_out), {}, attention_view(out), row_view(lse), {}, {}};
  if (out_low && out_low->numel() > 0) {
    check_tensor("out_low", *out_low, out_sizes_of(p, query), query.scalar_type(), query);
    inputs.out_low = attention_view(*out_low);
  }
  if (lse_low && lse_low->numel() > 0) {
    check_tensor("lse_low", *lse_low, row_sizes_of(p), real, query);
    inputs.lse_low = row_view(*lse_low);
  }
  if (grad_lse) {
    check_tensor("grad_lse", *grad_lse, row_sizes_of(p), real, query);
    inputs.grad_lse = row_view(*grad_lse);
  }
  if (!query.is_cuda()) {
    cpu::flash_backward(p, inputs, gradients.outputs());
  } else if constexpr (kWithCuda) {
    // Autograd always says which; whoever calls this op without saying gets the safe choice.
    cuda::flash_backward(p, inputs, gradients.outputs(), deterministic.value_or(true),
                         query.get_device_index(), TensorWorkspace(query));
  } else {
    built_without_cuda("flash_attention_backward");
  }
}

// --- dense ---

ForwardResult flash_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& key_lengths, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p, bool causal,
    OptionalInt window_left, OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap, std::optional<bool> /*deterministic*/,
    bool return_max_logits, bool return_low) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  return forward(check_dense(query, key, value, {attn_mask, key_lengths}, options), query,
                 return_max_logits, return_low);
}

DenseGradients flash_attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& out_low,
    const OptionalTensor& lse_low, const std::vector<bool>& wanted, const OptionalTensor& attn_mask,
    const OptionalTensor& key_lengths, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p, bool causal,
    OptionalInt window_left, OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap, std::optional<bool> deterministic) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  const CheckedProblem checked = check_dense(query, key, value, {attn_mask, key_lengths}, options);
  const Gradients gradients(
      query, key, value, attn_mask, options,
      {wanted[0], wanted[1], wanted[2], wanted[3], wanted[4], wanted[5]},
      query.is_cuda() && checked.problem.head_dim > 0 ? Start::unwritten : Start::zero);
  backward(checked, query, grad_out, grad_lse, out, lse, out_low, lse_low, deterministic,
           gradients);
  return {gradients.query(), gradients.key(),   gradients.value(),
          gradients.mask(),  gradients.alibi(), gradients.sinks()};
}

// --- packed ---

ForwardResult flash_attention_varlen_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& rng_state, double dropout_p, bool causal, OptionalInt window_left,
    OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap, std::optional<bool> /*deterministic*/,
    bool return_max_logits, bool return_low) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  const PackedOptions packed{cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                             max_seqlen_k, seqused_q,    seqused_k};
  return forward(check_packed(query, key, value, packed, options), query, return_max_logits,
                 return_low);
}

PackedGradients flash_attention_varlen_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, const Tensor& out, const Tensor& lse,
    const OptionalTensor& out_low, const OptionalTensor& lse_low, const std::vector<bool>& wanted,
    const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& rng_state, double dropout_p, bool causal, OptionalInt window_left,
    OptionalInt window_right, const std::optional<std::string>& alignment,
    std::optional<double> scale, double softcap, std::optional<bool> deterministic) {
  const ScoreOptions options{alibi_slopes, sinks,        rng_state, dropout_p, causal,
                             window_left,  window_right, alignment, scale,     softcap};
  const PackedOptions packed{cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                             max_seqlen_k, seqused_q,    seqused_k};
  const CheckedProblem checked = check_packed(query, key, value, packed, options);
  const Gradients gradients(query, key, value, std::nullopt, options,
                            {wanted[0], wanted[1], wanted[2], false, wanted[3], wanted[4]});
  backward(checked, query, grad_out, grad_lse, out, lse, out_low, lse_low, deterministic,
           gradients);
  return {gradients.query(), gradients.key(), gradients.value(), gradients.alibi(),
          gradients.sinks()};
}

template <class Library>
void register_flash_attention(Library& library) {
  library.impl("flash_attention_forward", TORCH_BOX(&flash_attention_forward));
  library.impl("flash_attention_backward", TORCH_BOX(&flash_attention_backward));
  library.impl("flash_attention_varlen_forward", TORCH_BOX(&flash_attention_varlen_forward));
  library.impl("flash_attention_varlen_backward", TORCH_BOX(&flash_attention_varlen_backward));
}

}  // namespace
}  // namespace flashattn::ops

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, library) {
  flashattn::ops::register_flash_attention(library);
}
STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, library) {
  flashattn::ops::register_flash_attention(library);
}
