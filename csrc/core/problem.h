// One attention call, free of any tensor library: what the kernels of every device are given.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "core/dtype.h"
#include "core/mask.h"
#include "core/sequences.h"
#include "core/tensor_view.h"

namespace flashattn {

// A mask tensor, read in place. Broadcast dimensions have stride 0 and their true size (1) here.
struct MaskTensor {
  UntypedView4 view;  // (batch | 1, heads_q | 1, len_q | 1, len_k | 1)
  DType dtype = DType::boolean;

  FLASHATTN_HD explicit operator bool() const { return static_cast<bool>(view); }
};

// Everything that shapes the scores. Packed calls use the same four dimensions, with batch stride 0
// and each sequence's first row added (see Sequences).
struct AttentionProblem {
  DType dtype = DType::float32;
  int64_t heads_q = 0, heads_kv = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  double scale = 1;
  double softcap = 0;
  MaskRule mask_rule;
  Sequences sequences;
  Dropout dropout;

  UntypedView4 query;  // (batch, heads_q, len_q, head_dim), dtype
  UntypedView4 key;    // (batch, heads_kv, len_k, head_dim), dtype
  UntypedView4 value;  // (batch, heads_kv, len_k, head_dim_v), dtype
  MaskTensor attn_mask;
  UntypedView4
      alibi_slopes;    // (batch, heads_q, 1, 1), accumulator type; stride 0 over batch if shared
  UntypedView4 sinks;  // (1, heads_q, 1, 1), accumulator type

  FLASHATTN_HD int64_t group_size() const { return heads_kv ? heads_q / heads_kv : 1; }
  FLASHATTN_HD int64_t kv_head(int64_t head) const { return head / group_size(); }
};

struct ForwardOutputs {
  UntypedView4 out;         // (batch, heads_q, len_q, head_dim_v), dtype
  UntypedView4 lse;         // (batch, heads_q, len_q, 1), accumulator type
  UntypedView4 max_logits;  // (batch, heads_q, 1, 1), fp32; absent unless asked for
  // What rounding lost, for backward; absent unless asked for.
  UntypedView4 out_low;  // like out: the exact output is out + out_low; 16-bit dtypes only
  UntypedView4 lse_low;  // like lse (see LogSumExp)
};

struct NaiveOutputs {
  UntypedView4 out;         // (batch, heads_q, len_q, head_dim_v), dtype
  UntypedView4 lse;         // (batch, heads_q, len_q, 1), accumulator type
  UntypedView4 max_logits;  // (batch, heads_q, 1, 1), fp32; absent unless asked for
  UntypedView4 weights;     // (batch, heads_q, len_q, len_k), dtype; absent unless asked for
  UntypedView4 probs;       // (batch, heads_q, len_q, len_k), dtype
};

struct NaiveBackwardInputs {
  UntypedView4 grad_out;      // (batch, heads_q, len_q, head_dim_v), dtype
  UntypedView4 grad_lse;      // (batch, heads_q, len_q, 1), accumulator type; may be absent
  UntypedView4 grad_weights;  // (batch, heads_q, len_q, len_k), dtype; may be absent
  UntypedView4 probs;         // (batch, heads_q, len_q, len_k), dtype
  UntypedView4 lse;           // (batch, heads_q, len_q, 1), accumulator type
};

struct BackwardInputs {
  UntypedView4 grad_out;  // (batch, heads_q, len_q, head_dim_v), dtype
  UntypedView4 grad_lse;  // (batch, heads_q, len_q, 1), accumulator type; may be absent
  UntypedView4 out;       // (batch, heads_q, len_q, head_dim_v), dtype
  UntypedView4 lse;       // (batch, heads_q, len_q, 1), accumulator type
  UntypedView4 out_low;   // like out; may be absent
  UntypedView4 lse_low;   // like lse; may be absent
};

// Absent views are gradients that nobody asked for.
struct BackwardOutputs {
  UntypedView4 grad_query;  // like query
  UntypedView4 grad_key;    // like key
  UntypedView4 grad_value;  // like value
  UntypedView4 grad_mask;   // like attn_mask, accumulator type
  UntypedView4 grad_alibi;  // (batch, heads_q, 1, 1), accumulator type; stride 0: summed over batch
  UntypedView4 grad_sinks;  // (1, heads_q, 1, 1), accumulator type
};

}  // namespace flashattn
