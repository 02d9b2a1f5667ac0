// The attention formula of the design, pair by pair in fp64: what the kernels are held against.
#pragma once

#include <cmath>
#include <vector>

#include "attention_case.h"

namespace flashattn::cpu {

// A dense fp64 array: the formula's own copy of a tensor, and its results.
struct Array {
  Index4 size{};
  std::vector<double> data;

  Array() = default;
  explicit Array(Index4 size, double value = 0)
      : size(size), data(static_cast<size_t>(size[0] * size[1] * size[2] * size[3]), value) {}
  explicit Array(const Tensor& tensor) : Array(tensor.size()) {
    tensor.for_each([&](Index4 at) { (*this)(at[0], at[1], at[2], at[3]) = tensor.get(at); });
  }
  double& operator()(int64_t a, int64_t b, int64_t c, int64_t d) {
    return data[static_cast<size_t>(((a * size[1] + b) * size[2] + c) * size[3] + d)];
  }
  double operator()(Index4 at) const {
    return const_cast<Array&>(*this)(at[0], at[1], at[2], at[3]);
  }
};

// Results and gradients; rows and elements that no pair reaches are 0.
struct Expected {
  Array out, lse, weights, probs, max_logits;
  Array grad_query, grad_key, grad_value, grad_mask, grad_alibi, grad_sinks;
};

class AttentionFormula {
 public:
  explicit AttentionFormula(const AttentionCase& c)
      : c_(c), query_(c.query), key_(c.key), value_(c.value), mask_(c.mask), grad_out_(c.grad_out) {
    const Options& o = c.o;
    e.out = Array(c.grad_out.size());
    e.lse = Array(c.grad_lse.size());
    e.max_logits = Array({o.batch, o.heads_q, 1, 1}, -INFINITY);
    e.grad_query = Array(c.query.size());
    e.grad_key = Array(c.key.size());
    e.grad_value = Array(c.value.size());
    e.grad_mask = Array(c.mask.size());
    e.grad_alibi = Array({o.batch, o.heads_q, 1, 1});
    e.grad_sinks = Array({1, o.heads_q, 1, 1});
    if (!o.packed) e.weights = e.probs = Array({o.batch, o.heads_q, o.len_q, o.len_k});
    for (int64_t b = 0; b < o.batch; ++b) {
      for (int64_t h = 0; h < o.heads_q; ++h) {
        for (int64_t i = 0; i < c.segments[static_cast<size_t>(b)].len_q; ++i) row(b, h, i);
      }
    }
  }

  Expected e;

 private:
  bool visible(const Segment& s, int64_t i, int64_t j) const {
    const MaskRule& rule = c_.o.rule;
    const int64_t shift = rule.alignment == Alignment::top_left ? 0 : s.len_k - s.len_q;
    return !(rule.causal && j > i + shift) && j >= i + shift - rule.window_left &&
           j <= i + shift + rule.window_right;
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const Options& o = c_.o;
    const Segment& s = c_.segments[static_cast<size_t>(b)];
    const int64_t kv = h / (o.heads_q / o.heads_kv), row = s.q_begin + i;
    const int64_t shift = o.rule.alignment == Alignment::top_left ? 0 : s.len_k - s.len_q;
    const auto count = static_cast<size_t>(s.len_k);
    std::vector<double> score(count), slope(count), keep(count, 1);

    double max = -INFINITY;
    for (int64_t j = 0; j < s.len_k; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < o.head_dim; ++c) {
        dot += query_(s.entry, h, row, c) * key_(s.entry, kv, s.k_begin + j, c);
      }
      double x = c_.problem.scale * dot;
      const double t = o.softcap > 0 ? std::tanh(x / o.softcap) : 0;
      if (o.softcap > 0) x = o.softcap * t;
      slope[j] = c_.problem.scale * (1 - t * t);
      if (c_.mask) {
        const double term = mask_(c_.mask_index(b, h, i, j));
        x = o.mask_dtype != DType::boolean ? x + term : term != 0 ? x : -INFINITY;
      }
      if (o.alibi) {
        x -= c_.alibi.get({b, h, 0, 0}) * std::fabs(static_cast<double>(i + shift - j));
      }
      score[j] = visible(s, i, j) ? x : -INFINITY;
      max = std::max(max, score[j]);
      if (o.dropout_p > 0) {
        const Dropout& dropout = c_.problem.dropout;
        keep[j] = dropout.stream(b, o.heads_q, h).keep(i, j) ? dropout.keep_scale() : 0;
      }
    }
    double& max_logit = e.max_logits(b, h, 0, 0);
    max_logit = std::max(max, max_logit);
    const double sink = o.sinks ? c_.sinks.get({0, h, 0, 0}) : -INFINITY;
    max = std::max(max, sink);
    double sum = max == -INFINITY ? 0 : std::exp(sink - max);
    for (const double x : score) sum += x == -INFINITY ? 0 : std::exp(x - max);
    const double lse = sum > 0 ? max + std::log(sum) : -INFINITY;
    e.lse(s.entry, h, row, 0) = lse;
    const auto p = [&](double x) { return x == -INFINITY ? 0.0 : std::exp(x - lse); };

    double delta = -c_.grad_lse.get({s.entry, h, row, 0});
    std::vector<double> grad_weight(count);
    for (int64_t j = 0; j < s.len_k; ++j) {
      const double weight = keep[j] * p(score[j]);
      if (!o.packed) e.weights(b, h, i, j) = weight;
      if (!o.packed) e.probs(b, h, i, j) = p(score[j]);
      for (int64_t c = 0; c < o.head_dim_v; ++c) {
        const double grad_out = grad_out_(s.entry, h, row, c);
        const double value = value_(s.entry, kv, s.k_begin + j, c);
        e.out(s.entry, h, row, c) += weight * value;
        e.grad_value(s.entry, kv, s.k_begin + j, c) += weight * grad_out;
        grad_weight[j] += grad_out * value;
      }
      delta += weight * grad_weight[j];
    }
    if (lse == -INFINITY) return;
    if (o.sinks) e.grad_sinks(0, h, 0, 0) -= p(sink) * delta;
    for (int64_t j = 0; j < s.len_k; ++j) {
      const double grad = p(score[j]) * (keep[j] * grad_weight[j] - delta);
      e.grad_alibi(b, h, 0, 0) -= grad * std::fabs(static_cast<double>(i + shift - j));
      if (c_.mask) {
        const Index4 at = c_.mask_index(b, h, i, j);
        e.grad_mask(at[0], at[1], at[2], at[3]) += grad;
      }
      for (int64_t c = 0; c < o.head_dim; ++c) {
        e.grad_query(s.entry, h, row, c) += grad * slope[j] * key_(s.entry, kv, s.k_begin + j, c);
        e.grad_key(s.entry, kv, s.k_begin + j, c) += grad * slope[j] * query_(s.entry, h, row, c);
      }
    }
  }

  const AttentionCase& c_;
  Array query_, key_, value_, mask_, grad_out_;
};

// Rounding to the element type, and sums in the accumulator type; relative to the largest entry.
inline double tolerance(DType element, DType accumulator) {
  const auto unit = [](DType dtype) {
    switch (dtype) {
      case DType::float16: return 0x1p-11;
      case DType::bfloat16: return 0x1p-8;
      case DType::float32: return 0x1p-24;
      default: return 0x1p-53;
    }
  };
  return 4 * unit(element) + 200 * unit(accumulator);
}

// Every element close to the expected one, and nothing written between the elements.
inline void expect_close(const char* name, const Tensor& got, const Array& expected,
                         double relative) {
  double largest = 1;
  for (const double x : expected.data) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  double worst = 0;
  Index4 where{};
  got.for_each([&](Index4 at) {
    const double a = got.get(at), b = expected(at);
    const double error = a == b ? 0 : std::fabs(a - b);
    if (!(error <= worst)) {
      worst = std::isnan(error) ? INFINITY : error;
      where = at;
    }
  });
  EXPECT_EQ(got.size(), expected.size) << name;
  EXPECT_LE(worst, relative * largest)
      << name << " at " << where[0] << ", " << where[1] << ", " << where[2] << ", " << where[3];
  EXPECT_TRUE(got.gaps_untouched()) << name;
}

}  // namespace flashattn::cpu
