// Every op's schema, in one block. Kernels are registered beside their code; autograd, fake,
// autocast and vmap rules live in Python, in the file of the op's name.
//
// The vocabulary and the meaning of each argument: docstrings of the Python functions of these
// names. `out_low` and `lse_low` are what rounding lost of `out` and `lse`; forward returns them,
// for backward, if `return_low` says so (out_low for 16-bit dtypes only), and zero-size tensors
// else.
#include <torch/csrc/stable/library.h>

// Arguments that shape the scores, in this order, in every attention op.
#define SCORE_OPTIONS                                                       \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, " \
  "float dropout_p=0.0, bool causal=False, SymInt? window_left=None, "      \
  "SymInt? window_right=None, str? alignment=None, float? scale=None, "     \
  "float softcap=0.0"

// Dense calls add a mask tensor and key lengths; packed calls have cumulative offsets.
#define DENSE_INPUTS "Tensor query, Tensor key, Tensor value"
#define DENSE_OPTIONS "Tensor? attn_mask=None, Tensor? key_lengths=None, " SCORE_OPTIONS
#define PACKED_INPUTS                                             \
  "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, " \
  "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
#define PACKED_OPTIONS "Tensor? seqused_q=None, Tensor? seqused_k=None, " SCORE_OPTIONS

STABLE_TORCH_LIBRARY(flashattn_ext, library) {
  library.def("softmax(Tensor input, int dim=-1, *, ScalarType? dtype=None) -> Tensor");
  library.def("log_softmax(Tensor input, int dim=-1, *, ScalarType? dtype=None) -> Tensor");
  library.def(
      "softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor");
  library.def(
      "log_softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor");

  library.def(
      "dropout_mask(Tensor rng_state, SymInt batch, SymInt heads_q, SymInt len_q, SymInt len_k, "
      "float dropout_p) -> Tensor");

  // probs: (batch, heads_q, len_q, len_k) before dropout, kept for backward.
  // weights: the same after dropout; zero-size unless asked for. max_logits likewise.
  library.def("naive_attention_forward(" DENSE_INPUTS ", " DENSE_OPTIONS
              ", bool return_max_logits=False, bool return_weights=False) "
              "-> (Tensor out, Tensor lse, Tensor max_logits, Tensor weights, Tensor probs)");
  library.def(
      "naive_attention_backward(Tensor grad_out, Tensor? grad_lse, "
      "Tensor? grad_weights, " DENSE_INPUTS
      ", Tensor probs, Tensor lse, bool[6] wanted, " DENSE_OPTIONS
      ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, "
      "Tensor grad_alibi, Tensor grad_sinks)");

  // wanted: which of the six gradients to compute, in the order of the results; the others come
  // back as zero-size tensors.
  library.def("flash_attention_forward(" DENSE_INPUTS ", " DENSE_OPTIONS
              ", bool? deterministic=None, bool return_max_logits=False, bool return_low=False) "
              "-> (Tensor out, Tensor lse, Tensor max_logits, Tensor out_low, Tensor lse_low)");
  library.def(
      "flash_attention_backward(Tensor grad_out, Tensor? grad_lse, " DENSE_INPUTS
      ", Tensor out, Tensor lse, Tensor? out_low, Tensor? lse_low, bool[6] wanted, " DENSE_OPTIONS
      ", bool? deterministic=None) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, "
      "Tensor grad_alibi, Tensor grad_sinks)");

  library.def("flash_attention_varlen_forward(" PACKED_INPUTS ", " PACKED_OPTIONS
              ", bool? deterministic=None, bool return_max_logits=False, bool return_low=False) "
              "-> (Tensor out, Tensor lse, Tensor max_logits, Tensor out_low, Tensor lse_low)");
  library.def(
      "flash_attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, " PACKED_INPUTS
      ", Tensor out, Tensor lse, Tensor? out_low, Tensor? lse_low, bool[5] wanted, " PACKED_OPTIONS
      ", bool? deterministic=None) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_alibi, "
      "Tensor grad_sinks)");
}
