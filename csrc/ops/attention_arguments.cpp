#include "ops/attention_arguments.h"

#include <cmath>

namespace flashattn::ops {
namespace {

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t d = 0; d < sizes.size(); ++d) text << (d ? ", " : "") << sizes[d];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

void check_same_device(const char* name, const Tensor& tensor, const Tensor& query) {
  FLASHATTN_CHECK(same_device(tensor, query), name, "the device of query, " + device_text(query),
                  device_text(tensor));
}

void check_dtype(const char* name, const Tensor& tensor, ScalarType expected) {
  FLASHATTN_CHECK(tensor.scalar_type() == expected, name, "dtype " + dtype_text(expected),
                  dtype_text(tensor.scalar_type()));
}

void check_shape(const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
  FLASHATTN_CHECK(sizes_of(tensor) == expected, name, "shape " + sizes_text(expected),
                  shape_text(tensor));
}

void check_rank(const char* name, const Tensor& tensor, int64_t rank, const char* shape) {
  FLASHATTN_CHECK(tensor.dim() == rank, name, std::to_string(rank) + " dimensions " + shape,
                  shape_text(tensor));
}

struct Geometry {
  int64_t heads_q, heads_kv, head_dim, head_dim_v;
};

// What query, key and value owe each other, whatever dimension their heads are in.
Geometry check_inputs(const Tensor& query, const Tensor& key, const Tensor& value,
                      int64_t heads_dimension, int64_t length_dimension) {
  FLASHATTN_CHECK(is_supported_float(query.scalar_type()), "query",
                  "dtype float16, bfloat16, float32 or float64", dtype_text(query.scalar_type()));
  for (const auto& [name, tensor] : {std::pair{"key", key}, std::pair{"value", value}}) {
    check_dtype(name, tensor, query.scalar_type());
    check_same_device(name, tensor, query);
  }
  const int64_t last = query.dim() - 1;
  const Geometry g{query.size(heads_dimension), key.size(heads_dimension), query.size(last),
                   value.size(last)};
  FLASHATTN_CHECK(key.size(last) == g.head_dim, "key",
                  "head_dim " + std::to_string(g.head_dim) + " as in query", shape_text(key));
  FLASHATTN_CHECK(value.size(heads_dimension) == g.heads_kv, "value",
                  std::to_string(g.heads_kv) + " heads as in key", shape_text(value));
  FLASHATTN_CHECK(value.size(length_dimension) == key.size(length_dimension), "value",
                  "length " + std::to_string(key.size(length_dimension)) + " as in key",
                  shape_text(value));
  const bool groups = g.heads_kv == 0 ? g.heads_q == 0 : g.heads_q % g.heads_kv == 0;
  FLASHATTN_CHECK(groups, "query",
                  "heads_q to be a multiple of heads_kv = " + std::to_string(g.heads_kv),
                  "heads_q = " + std::to_string(g.heads_q));
  FLASHATTN_CHECK(g.head_dim <= kMaxHeadDim, "query",
                  "head_dim of at most " + std::to_string(kMaxHeadDim), g.head_dim);
  FLASHATTN_CHECK(g.head_dim_v <= kMaxHeadDim, "value",
                  "head_dim_v of at most " + std::to_string(kMaxHeadDim), g.head_dim_v);
  return g;
}

IntegerList check_integers(const char* name, const Tensor& tensor, int64_t count,
                           const Tensor& query) {
  FLASHATTN_CHECK(
      tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long, name,
      "dtype int32 or int64", dtype_text(tensor.scalar_type()));
  check_shape(name, tensor, {count});
  check_same_device(name, tensor, query);
  IntegerList list;
  list.stride = count ? tensor.stride(0) : 1;
  if (tensor.scalar_type() == ScalarType::Int) {
    list.as_int32 = static_cast<const int32_t*>(tensor.const_data_ptr());
  } else {
    list.as_int64 = static_cast<const int64_t*>(tensor.const_data_ptr());
  }
  return list;
}

// Lengths are read on the host only where that needs no synchronisation.
bool host_readable(const Tensor& tensor) { return tensor.is_cpu(); }

void check_length(const char* name, int64_t index, int64_t value, int64_t low, int64_t high,
                  const char* bound) {
  FLASHATTN_CHECK(
      value >= low && value <= high, std::string(name) + "[" + std::to_string(index) + "]",
      "a number from " + std::to_string(low) + " to " + std::to_string(high) + " (" + bound + ")",
      value);
}

MaskTensor check_attn_mask(const Tensor& mask, const Tensor& query, int64_t len_k) {
  const ScalarType dtype = mask.scalar_type();
  FLASHATTN_CHECK(
      dtype == ScalarType::Bool || dtype == ScalarType::Float || dtype == query.scalar_type(),
      "attn_mask", "dtype bool, float32 or " + dtype_text(query.scalar_type()) + " (as query)",
      dtype_text(dtype));
  check_same_device("attn_mask", mask, query);
  const std::vector<int64_t> full{query.size(0), query.size(1), query.size(2), len_k};
  MaskTensor result;
  result.dtype = to_dtype(dtype);
  result.view.data = const_cast<void*>(mask.const_data_ptr());
  bool broadcasts = mask.dim() <= 4;
  for (int64_t d = 0; d < 4 && broadcasts; ++d) {
    const int64_t own = d - (4 - mask.dim());
    result.view.size[d] = own < 0 ? 1 : mask.size(own);
    result.view.stride[d] = own < 0 || mask.size(own) == 1 ? 0 : mask.stride(own);
    broadcasts = result.view.size[d] == 1 || result.view.size[d] == full[d];
  }
  FLASHATTN_CHECK(broadcasts, "attn_mask",
                  "a shape that broadcasts to (batch, heads_q, len_q, len_k) = " + sizes_text(full),
                  shape_text(mask));
  return result;
}

MaskRule check_mask_rule(const ScoreOptions& options, bool lengths_differ,
                         Alignment default_alignment, bool must_choose) {
  MaskRule rule;
  rule.causal = options.causal;
  for (const auto& [name, side, target] :
       {std::tuple{"window_left", options.window_left, &rule.window_left},
        std::tuple{"window_right", options.window_right, &rule.window_right}}) {
    if (!side) continue;
    FLASHATTN_CHECK(*side >= 0, name, "None (unlimited) or a number of keys from 0", *side);
    *target = std::min<int64_t>(*side, kUnlimited);
  }
  rule.alignment = default_alignment;
  if (options.alignment) {
    const bool top_left = *options.alignment == "top_left";
    FLASHATTN_CHECK(top_left || *options.alignment == "bottom_right", "alignment",
                    "\"top_left\" or \"bottom_right\"", '"' + *options.alignment + '"');
    rule.alignment = top_left ? Alignment::top_left : Alignment::bottom_right;
  } else if (must_choose && lengths_differ) {
    const bool diagonal =
        options.causal || options.window_left || options.window_right || options.alibi_slopes;
    FLASHATTN_CHECK(
        !diagonal, "alignment",
        "\"top_left\" or \"bottom_right\", since causal, window or alibi_slopes is used "
        "and len_q may differ from len_k",
        "None");
  }
  return rule;
}

const Tensor& converted(const Tensor& tensor, ScalarType dtype, CheckedProblem& checked) {
  return checked.owned.emplace_back(torch::stable::to(tensor, dtype));
}

// Fills what ScoreOptions decide.
void apply_score_options(const ScoreOptions& options, const Tensor& query,
                         CheckedProblem& checked) {
  AttentionProblem& p = checked.problem;
  const int64_t batch = p.sequences.count;
  const ScalarType real = accumulator_dtype(query.scalar_type());
  FLASHATTN_CHECK(options.softcap >= 0, "softcap", "a number from 0 (0: none)", options.softcap);
  FLASHATTN_CHECK(options.dropout_p >= 0 && options.dropout_p <= 1, "dropout_p",
                  "a probability from 0 to 1", options.dropout_p);
  p.softcap = options.softcap;
  // head_dim 0 leaves nothing to attend by: like len_k = 0, it gives zeros.
  if (p.head_dim == 0) p.sequences.storage_k = p.sequences.max_len_k = 0;
  p.scale = options.scale ? *options.scale
                          : 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(p.head_dim, 1)));

  if (options.alibi_slopes) {
    const Tensor& slopes = *options.alibi_slopes;
    const ScalarType dtype = slopes.scalar_type();
    FLASHATTN_CHECK(dtype == ScalarType::Float || dtype == real, "alibi_slopes", "dtype float32",
                    dtype_text(dtype));
    check_same_device("alibi_slopes", slopes, query);
    const bool shared = slopes.dim() == 1 && slopes.size(0) == p.heads_q;
    const bool own = slopes.dim() == 2 && slopes.size(0) == batch && slopes.size(1) == p.heads_q;
    FLASHATTN_CHECK(shared || own, "alibi_slopes",
                    "shape (heads_q,) = " + sizes_text({p.heads_q}) +
                        " or (batch, heads_q) = " + sizes_text({batch, p.heads_q}),
                    shape_text(slopes));
    p.alibi_slopes = head_view(converted(slopes, real, checked));
  }
  if (options.sinks) {
    const Tensor& sinks = *options.sinks;
    FLASHATTN_CHECK(is_supported_float(sinks.scalar_type()), "sinks", "a floating dtype",
                    dtype_text(sinks.scalar_type()));
    check_shape("sinks", sinks, {p.heads_q});
    check_same_device("sinks", sinks, query);
    p.sinks = head_view(converted(sinks, real, checked));
  }
  if (options.rng_state) {
    check_dtype("rng_state", *options.rng_state, ScalarType::Long);
    check_shape("rng_state", *options.rng_state, {2});
    check_same_device("rng_state", *options.rng_state, query);
  }
  if (options.dropout_p > 0) {
    FLASHATTN_CHECK(options.rng_state.has_value(), "rng_state",
                    "an int64 tensor [seed, offset] (see reserve_rng), since dropout_p > 0",
                    "None");
    const Tensor& state = checked.owned.emplace_back(torch::stable::contiguous(*options.rng_state));
    p.dropout.rng_state = static_cast<const int64_t*>(state.const_data_ptr());
    p.dropout.threshold = Dropout::threshold_for(options.dropout_p);
  }
}

void set_geometry(const Geometry& g, ScalarType dtype, AttentionProblem& p) {
  p.dtype = to_dtype(dtype);
  p.heads_q = g.heads_q;
  p.heads_kv = g.heads_kv;
  p.head_dim = g.head_dim;
  p.head_dim_v = g.head_dim_v;
}

}  // namespace

namespace {

UntypedView4 dense_view(const Tensor& tensor) {
  UntypedView4 view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
  for (int64_t d = 0; d < 4; ++d) {
    view.size[d] = tensor.size(d);
    view.stride[d] = tensor.stride(d);
  }
  return view;
}

UntypedView4 packed_view(const Tensor& tensor) {
  UntypedView4 view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.size[0] = 1;
  constexpr int kFrom[] = {1, 0, 2};  // heads, rows, columns
  for (int64_t d = 0; d < 3; ++d) {
    view.size[d + 1] = tensor.size(kFrom[d]);
    view.stride[d + 1] = tensor.stride(kFrom[d]);
  }
  return view;
}

}  // namespace

UntypedView4 attention_view(const Tensor& tensor) {
  return tensor.dim() == 3 ? packed_view(tensor) : dense_view(tensor);
}

UntypedView4 head_view(const Tensor& tensor) {
  UntypedView4 view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.size[0] = view.size[2] = view.size[3] = 1;
  const int64_t missing = 2 - tensor.dim();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    view.size[d + missing] = tensor.size(d);
    view.stride[d + missing] = tensor.stride(d);
  }
  return view;
}

UntypedView4 row_view(const Tensor& tensor) {
  UntypedView4 view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.size[0] = view.size[3] = 1;
  const int64_t missing = 3 - tensor.dim();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    view.size[d + missing] = tensor.size(d);
    view.stride[d + missing] = tensor.stride(d);
  }
  return view;
}

void check_tensor(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes,
                  ScalarType dtype, const Tensor& device_of) {
  check_dtype(name, tensor, dtype);
  check_shape(name, tensor, sizes);
  check_same_device(name, tensor, device_of);
}

CheckedProblem check_dense(const Tensor& query, const Tensor& key, const Tensor& value,
                           const DenseOptions& dense, const ScoreOptions& options) {
  check_rank("query", query, 4, "(batch, heads_q, len_q, head_dim)");
  check_rank("key", key, 4, "(batch, heads_kv, len_k, head_dim)");
  check_rank("value", value, 4, "(batch, heads_kv, len_k, head_dim_v)");
  const Geometry geometry = check_inputs(query, key, value, 1, 2);
  const int64_t batch = query.size(0), len_q = query.size(2), len_k = key.size(2);
  for (const auto& [name, tensor] : {std::pair{"key", key}, std::pair{"value", value}}) {
    FLASHATTN_CHECK(tensor.size(0) == batch, name,
                    "batch " + std::to_string(batch) + " as in query", shape_text(tensor));
  }

  CheckedProblem checked;
  AttentionProblem& p = checked.problem;
  set_geometry(geometry, query.scalar_type(), p);
  p.query = attention_view(query);
  p.key = attention_view(key);
  p.value = attention_view(value);
  p.sequences.count = batch;
  p.sequences.storage_q = p.sequences.max_len_q = len_q;
  p.sequences.storage_k = p.sequences.max_len_k = len_k;
  if (dense.key_lengths) {
    p.sequences.key_lengths = check_integers("key_lengths", *dense.key_lengths, batch, query);
    if (host_readable(*dense.key_lengths)) {
      for (int64_t b = 0; b < batch; ++b) {
        check_length("key_lengths", b, p.sequences.key_lengths[b], 0, len_k, "len_k");
      }
    }
  }
  if (dense.attn_mask) p.attn_mask = check_attn_mask(*dense.attn_mask, query, len_k);
  // Key lengths are data: whether they differ from len_q must not decide what a call means.
  const bool lengths_differ = len_q != len_k || dense.key_lengths;
  p.mask_rule = check_mask_rule(options, lengths_differ, Alignment::top_left, true);
  apply_score_options(options, query, checked);
  return checked;
}

CheckedProblem check_packed(const Tensor& query, const Tensor& key, const Tensor& value,
                            const PackedOptions& packed, const ScoreOptions& options) {
  check_rank("query", query, 3, "(total_q, heads_q, head_dim)");
  check_rank("key", key, 3, "(total_k, heads_kv, head_dim)");
  check_rank("value", value, 3, "(total_k, heads_kv, head_dim_v)");
  const Geometry geometry = check_inputs(query, key, value, 1, 0);
  FLASHATTN_CHECK(packed.cu_seqlens_q.dim() == 1 && packed.cu_seqlens_q.size(0) >= 1,
                  "cu_seqlens_q", "shape (sequences + 1,)", shape_text(packed.cu_seqlens_q));
  const int64_t count = packed.cu_seqlens_q.size(0) - 1;

  CheckedProblem checked;
  AttentionProblem& p = checked.problem;
  set_geometry(geometry, query.scalar_type(), p);
  p.query = attention_view(query);
  p.key = attention_view(key);
  p.value = attention_view(value);
  Sequences& s = p.sequences;
  s.count = count;
  s.storage_q = query.size(0);
  s.storage_k = key.size(0);
  struct Side {
    const char *cu_name, *used_name, *max_name;
    const Tensor& cu;
    const OptionalTensor& used;
    int64_t max, storage;
    IntegerList &cu_list, &used_list;
    int64_t& max_length;
  };
  for (const Side& side :
       {Side{"cu_seqlens_q", "seqused_q", "max_seqlen_q", packed.cu_seqlens_q, packed.seqused_q,
             packed.max_seqlen_q, s.storage_q, s.cu_q, s.used_q, s.max_len_q},
        Side{"cu_seqlens_k", "seqused_k", "max_seqlen_k", packed.cu_seqlens_k, packed.seqused_k,
             packed.max_seqlen_k, s.storage_k, s.cu_k, s.used_k, s.max_len_k}}) {
    side.cu_list = check_integers(side.cu_name, side.cu, count + 1, query);
    if (side.used) side.used_list = check_integers(side.used_name, *side.used, count, query);
    FLASHATTN_CHECK(side.max >= 0, side.max_name, "a length from 0", side.max);
    // A longer maximum than the storage is harmless; tiles are cut for what can be there.
    side.max_length = std::min(side.max, side.storage);
    if (!host_readable(side.cu)) continue;
    int64_t previous = 0;
    for (int64_t i = 0; i <= count; ++i) {
      check_length(side.cu_name, i, side.cu_list[i], previous, side.storage,
                   "from the offset before it to the number of rows");
      const int64_t segment = i ? side.cu_list[i] - previous : 0;
      int64_t length = segment;
      if (i && side.used) {
        length = side.used_list[i - 1];
        check_length(side.used_name, i - 1, length, 0, segment, "the length of its segment");
      }
      FLASHATTN_CHECK(length <= side.max, side.max_name,
                      "at least the longest sequence, " + std::to_string(length), side.max);
      previous = side.cu_list[i];
    }
  }
  p.mask_rule = check_mask_rule(options, true, Alignment::bottom_right, false);
  apply_score_options(options, query, checked);
  return checked;
}

}  // namespace flashattn::ops
