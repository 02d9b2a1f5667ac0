#include "ops/gradients.h"

namespace flashattn::ops {
namespace {

Tensor in_layout_of(const Tensor& input, bool wanted, Start start) {
  if (!wanted) return absent_output(input.scalar_type(), input);
  const std::vector<int64_t> sizes = sizes_of(input);
  Tensor grad = empty_strided(sizes, dense_strides_like(input, sizes), input.scalar_type(), input);
  if (start == Start::zero) fill_with_zeros(grad);
  return grad;
}

OptionalTensor zero_sum(const OptionalTensor& input, bool wanted, ScalarType dtype) {
  if (!wanted || !input) return std::nullopt;
  Tensor sum = empty_contiguous(sizes_of(*input), dtype, *input);
  fill_with_zeros(sum);
  return sum;
}

// The gradient of a mask of any rank, as four dimensions with their true sizes.
UntypedView4 mask_view(const Tensor& sum) {
  UntypedView4 view;
  view.data = const_cast<void*>(sum.const_data_ptr());
  const int64_t missing = 4 - sum.dim();
  for (int64_t d = 0; d < 4; ++d) {
    view.size[d] = d < missing ? 1 : sum.size(d - missing);
    view.stride[d] = d < missing ? 0 : sum.stride(d - missing);
  }
  return view;
}

}  // namespace

Gradients::Gradients(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& attn_mask, const ScoreOptions& options, Wanted wanted,
                     Start start)
    : query_(in_layout_of(query, wanted.query, start)),
      key_(in_layout_of(key, wanted.key, start)),
      value_(in_layout_of(value, wanted.value, start)) {
  const ScalarType real = accumulator_dtype(query.scalar_type());
  const bool float_mask = attn_mask && attn_mask->scalar_type() != ScalarType::Bool;
  mask_ = {attn_mask, zero_sum(attn_mask, wanted.mask && float_mask, real)};
  alibi_ = {options.alibi_slopes, zero_sum(options.alibi_slopes, wanted.alibi, real)};
  sinks_ = {options.sinks, zero_sum(options.sinks, wanted.sinks, real)};

  if (wanted.query) outputs_.grad_query = attention_view(query_);
  if (wanted.key) outputs_.grad_key = attention_view(key_);
  if (wanted.value) outputs_.grad_value = attention_view(value_);
  if (mask_.sum) outputs_.grad_mask = mask_view(*mask_.sum);
  if (alibi_.sum) outputs_.grad_alibi = head_view(*alibi_.sum);
  if (sinks_.sum) outputs_.grad_sinks = head_view(*sinks_.sum);
}

Tensor Gradients::finish(const Sum& sum) const {
  if (!sum.sum) return absent_output((sum.input ? *sum.input : query_).scalar_type(), query_);
  return torch::stable::to(*sum.sum, sum.input->scalar_type());
}

Tensor Gradients::mask() const { return finish(mask_); }
Tensor Gradients::alibi() const { return finish(alibi_); }
Tensor Gradients::sinks() const { return finish(sinks_); }

}  // namespace flashattn::ops
