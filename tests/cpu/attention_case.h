// One attention call for the tests of the kernels: options, tensors and the problem made of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/problem.h"
#include "tensors.h"

namespace flashattn::cpu {

struct Options {
  DType dtype = DType::float32;
  int64_t batch = 2, heads_q = 2, heads_kv = 1, len_q = 5, len_k = 7;
  int64_t head_dim = 8, head_dim_v = 8;
  MaskRule rule;
  double softcap = 0, dropout_p = 0;
  std::string mask;  // which dimensions of bhqk are not broadcast, such as "b11k"; "": no mask
  DType mask_dtype = DType::boolean;
  bool alibi = false, sinks = false, key_lengths = false;
  bool packed = false, used = false;
  Layout layout;
  unsigned seed = 0;

  std::string text() const {
    std::ostringstream text;
    text << "seed " << seed << " dtype " << static_cast<int>(dtype) << " batch " << batch
         << " heads " << heads_q << '/' << heads_kv << " len " << len_q << '/' << len_k << " dims "
         << head_dim << '/' << head_dim_v << (rule.causal ? " causal" : "") << " window "
         << rule.window_left << ", " << rule.window_right << " align "
         << static_cast<int>(rule.alignment) << " softcap " << softcap << " dropout " << dropout_p
         << " mask '" << mask << "' of dtype " << static_cast<int>(mask_dtype)
         << (alibi ? " alibi" : "") << (sinks ? " sinks" : "") << (key_lengths ? " lengths" : "")
         << (packed ? " packed" : "") << (used ? " used" : "") << " gap " << layout.gap;
    return text.str();
  }
};

// Rows of one sequence in the storage; `entry` is the index of the batch dimension.
struct Segment {
  int64_t entry, q_begin, len_q, k_begin, len_k;
};

class AttentionCase {
 public:
  explicit AttentionCase(const Options& options) : o(options), random_(options.seed + 1) {
    make_sequences();
    make_inputs();
    make_problem();
  }
  AttentionCase(const AttentionCase&) = delete;

  const Options o;
  std::vector<Segment> segments;
  int64_t entries, storage_q, storage_k;
  Tensor query, key, value, mask, alibi, sinks, grad_out, grad_lse;
  AttentionProblem problem;

  // A result like query or key: rows of the storage, in the layout of the case. Packed sequences
  // share the one entry of the first dimension, so its stride is 0.
  Tensor rows(DType dtype, int64_t heads, int64_t length, int64_t columns) const {
    Layout layout = o.layout;
    layout.expanded = {o.packed};
    return Tensor(dtype, {entries, heads, length, columns}, layout);
  }
  // A tensor like lse: contiguous.
  Tensor row_terms() const {
    return Tensor(accumulator_of(o.dtype), {entries, o.heads_q, storage_q, 1},
                  {.expanded = {o.packed}});
  }
  // Sizes of attn_mask, and of its gradient.
  Index4 mask_size() const {
    const Index4 full{o.batch, o.heads_q, o.len_q, o.len_k};
    Index4 size{};
    for (size_t d = 0; d < 4; ++d) size[d] = o.mask[d] == '1' ? 1 : full[d];
    return size;
  }
  // Index of attn_mask for a pair.
  Index4 mask_index(int64_t b, int64_t h, int64_t i, int64_t j) const {
    Index4 at{b, h, i, j};
    for (size_t d = 0; d < 4; ++d) at[d] = o.mask[d] == '1' ? 0 : at[d];
    return at;
  }

 private:
  double normal() { return std::normal_distribution<double>()(random_); }
  int64_t up_to(int64_t most) { return static_cast<int64_t>(random_() % (most + 1)); }

  // Packed storage is longer than the sequences need: some rows belong to none.
  void make_sequences() {
    entries = o.packed ? 1 : o.batch;
    storage_q = o.len_q;
    storage_k = o.len_k;
    if (!o.packed) {
      for (int64_t b = 0; b < o.batch; ++b) {
        const int64_t len_k = o.key_lengths ? up_to(o.len_k) : o.len_k;
        segments.push_back({b, 0, o.len_q, 0, len_k});
        lengths_.push_back(len_k);
      }
      return;
    }
    int64_t q = 0, k = 0;
    for (int64_t s = 0; s < o.batch; ++s) {
      const int64_t len_q = up_to(o.len_q), len_k = up_to(o.len_k);
      cu_q_.push_back(static_cast<int32_t>(q));
      cu_k_.push_back(k);
      const int64_t used_q = o.used ? up_to(len_q) : len_q, used_k = o.used ? up_to(len_k) : len_k;
      used_q_.push_back(used_q);
      used_k_.push_back(static_cast<int32_t>(used_k));
      segments.push_back({0, q, used_q, k, used_k});
      q += len_q;
      k += len_k;
    }
    cu_q_.push_back(static_cast<int32_t>(q));
    cu_k_.push_back(k);
    storage_q = q + 2;
    storage_k = k + 2;
  }

  // Only the rows of a sequence get numbers; everything else stays poison.
  void make_inputs() {
    Layout layout = o.layout;
    layout.expanded[0] = o.packed;
    query = Tensor(o.dtype, {entries, o.heads_q, storage_q, o.head_dim}, layout);
    key = Tensor(o.dtype, {entries, o.heads_kv, storage_k, o.head_dim}, layout);
    value = Tensor(o.dtype, {entries, o.heads_kv, storage_k, o.head_dim_v}, layout);
    grad_out = Tensor(o.dtype, {entries, o.heads_q, storage_q, o.head_dim_v}, layout);
    grad_lse = row_terms();
    for (const Segment& s : segments) {
      fill_rows(query, s.entry, s.q_begin, s.len_q);
      fill_rows(grad_out, s.entry, s.q_begin, s.len_q);
      fill_rows(grad_lse, s.entry, s.q_begin, s.len_q);
      fill_rows(key, s.entry, s.k_begin, s.len_k);
      fill_rows(value, s.entry, s.k_begin, s.len_k);
    }
    if (!o.mask.empty()) {
      mask = Tensor(o.mask_dtype, mask_size(), {.gap = o.layout.gap, .offset = o.layout.offset});
      mask.for_each([&](Index4 at) {
        const bool hidden = random_() % 4 == 0;
        if (o.mask_dtype == DType::boolean) return mask.set(at, !hidden);
        mask.set(at, hidden ? -INFINITY : 2 * normal());
      });
    }
    if (o.alibi) {
      alibi = Tensor(accumulator_of(o.dtype), {o.batch, o.heads_q, 1, 1});
      alibi.for_each([&](Index4 at) { alibi.set(at, 0.3 * std::fabs(normal())); });
    }
    if (o.sinks) {
      sinks = Tensor(accumulator_of(o.dtype), {1, o.heads_q, 1, 1});
      sinks.for_each([&](Index4 at) { sinks.set(at, normal()); });
    }
  }

  void fill_rows(Tensor& tensor, int64_t entry, int64_t begin, int64_t count) {
    for (int64_t h = 0; h < tensor.size()[1]; ++h) {
      for (int64_t i = begin; i < begin + count; ++i) {
        for (int64_t c = 0; c < tensor.size()[3]; ++c) tensor.set({entry, h, i, c}, normal());
      }
    }
  }

  void make_problem() {
    AttentionProblem& p = problem;
    p.dtype = o.dtype;
    p.heads_q = o.heads_q;
    p.heads_kv = o.heads_kv;
    p.head_dim = o.head_dim;
    p.head_dim_v = o.head_dim_v;
    p.scale = 1 / std::sqrt(std::max<double>(1, static_cast<double>(o.head_dim)));
    p.softcap = o.softcap;
    p.mask_rule = o.rule;
    p.query = query.view();
    p.key = key.view();
    p.value = value.view();
    p.attn_mask = {mask.view(), o.mask_dtype};
    p.alibi_slopes = alibi.view();
    p.sinks = sinks.view();
    if (o.dropout_p > 0) {
      rng_state_[0] = 1234 + static_cast<int64_t>(o.seed);
      p.dropout = {rng_state_, Dropout::threshold_for(o.dropout_p)};
    }
    Sequences& s = p.sequences;
    s.count = o.batch;
    s.storage_q = storage_q;
    s.storage_k = storage_k;
    s.max_len_q = o.len_q;
    s.max_len_k = o.len_k;
    if (o.packed) {
      s.cu_q.as_int32 = cu_q_.data();
      s.cu_k.as_int64 = cu_k_.data();
      if (o.used) {
        s.used_q.as_int64 = used_q_.data();
        s.used_k.as_int32 = used_k_.data();
      }
    } else if (o.key_lengths) {
      s.key_lengths.as_int64 = lengths_.data();
    }
  }

  std::mt19937 random_;
  std::vector<int64_t> lengths_, cu_k_, used_q_;
  std::vector<int32_t> cu_q_, used_k_;
  int64_t rng_state_[2] = {0, 77};
};

// Options drawn at random: every combination turns up, odd sizes most of all.
inline Options random_options(unsigned seed, DType dtype) {
  std::mt19937 random(seed);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  const auto chance = [&](unsigned one_in) { return random() % one_in == 0; };
  Options o;
  o.seed = seed;
  o.dtype = dtype;
  o.batch = one_of({1, 2, 3});
  o.heads_kv = one_of({1, 2});
  o.heads_q = o.heads_kv * one_of({1, 2, 3, 5});
  o.len_q = one_of({1, 2, 15, 33, 64, 65, 90});
  o.len_k = chance(3) ? o.len_q : one_of({1, 3, 16, 31, 127, 128, 129, 150});
  o.head_dim = one_of({1, 3, 8, 16, 17, 40});
  o.head_dim_v = chance(2) ? o.head_dim : one_of({1, 5, 16, 33});
  o.rule.causal = chance(2);
  if (chance(3)) o.rule.window_left = one_of({0, 1, 10, 64, 200});
  if (chance(3)) o.rule.window_right = one_of({0, 1, 10, 64, 200});
  o.rule.alignment = chance(2) ? Alignment::top_left : Alignment::bottom_right;
  if (chance(3)) o.softcap = 1.5;
  if (chance(3)) o.dropout_p = 0.3;
  o.alibi = chance(3);
  o.sinks = chance(3);
  o.packed = chance(3);
  if (o.packed) {
    o.used = chance(2);
  } else {
    o.key_lengths = chance(3);
    if (chance(2)) {
      const std::string full = "bhqk";
      o.mask = full;
      for (char& dimension : o.mask) dimension = chance(2) ? '1' : dimension;
      o.mask_dtype = chance(2) ? DType::boolean : chance(2) ? dtype : accumulator_of(dtype);
    }
  }
  std::shuffle(o.layout.order.begin() + (o.packed ? 1 : 0), o.layout.order.end(), random);
  o.layout.gap = one_of({0, 0, 0, 1});
  o.layout.offset = one_of({0, 1, 3});
  if (!o.packed && chance(6)) o.layout.expanded[1] = true;
  return o;
}

}  // namespace flashattn::cpu
