// The arguments of an attention op: checked once, then made into a problem of core/.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "ops/tensors.h"

namespace flashattn::ops {

using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;

// What dense and packed ops have in common, in the order of SCORE_OPTIONS in schema.cpp.
struct ScoreOptions {
  OptionalTensor alibi_slopes;  // (heads_q) or (batch, heads_q), fp32
  OptionalTensor sinks;         // (heads_q), floating
  OptionalTensor rng_state;     // (2), int64
  double dropout_p;
  bool causal;
  OptionalInt window_left, window_right;
  std::optional<std::string> alignment;
  std::optional<double> scale;
  double softcap;
};

struct DenseOptions {
  OptionalTensor attn_mask;    // broadcasts to (batch, heads_q, len_q, len_k)
  OptionalTensor key_lengths;  // (batch)
};

struct PackedOptions {
  Tensor cu_seqlens_q, cu_seqlens_k;  // (sequences + 1)
  int64_t max_seqlen_q, max_seqlen_k;
  OptionalTensor seqused_q, seqused_k;  // (sequences)
};

// A problem, and the tensors that had to be converted for it and must live as long.
struct CheckedProblem {
  AttentionProblem problem;
  std::vector<Tensor> owned;
};

// `query` (batch, heads_q, len_q, head_dim), `key`, `value` (batch, heads_kv, len_k, head_dim(_v)).
CheckedProblem check_dense(const Tensor& query, const Tensor& key, const Tensor& value,
                           const DenseOptions& dense, const ScoreOptions& options);

// `query` (total_q, heads_q, head_dim), `key`, `value` (total_k, heads_kv, head_dim(_v)).
CheckedProblem check_packed(const Tensor& query, const Tensor& key, const Tensor& value,
                            const PackedOptions& packed, const ScoreOptions& options);

// A tensor that must have this shape, dtype and device.
void check_tensor(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes,
                  ScalarType dtype, const Tensor& device_of);

// (batch, heads, rows, columns), or packed (rows, heads, columns) with batch stride 0.
UntypedView4 attention_view(const Tensor& tensor);
// (batch, heads, rows), or packed (heads, rows), with one column.
UntypedView4 row_view(const Tensor& tensor);
// (batch, heads), or (heads) shared by the batch, with one row and column.
UntypedView4 head_view(const Tensor& tensor);

}  // namespace flashattn::ops
