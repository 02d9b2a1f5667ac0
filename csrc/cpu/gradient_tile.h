// The recomputed probabilities of one tile and the gradient of its scores: what backward does
// before it multiplies with query, key or grad_out. Shared by the passes of backward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/online_softmax.h"
#include "core/problem.h"
#include "core/softmax_gradient.h"
#include "cpu/microkernels.h"
#include "cpu/pack.h"
#include "cpu/score_terms.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {

struct GradientTileSize {
  static constexpr int64_t kQueries = 64;
  static constexpr int64_t kKeys = 128;
};

template <class Element>
class GradientTile {
  using Real = Accumulator<Element>;
  static constexpr int64_t kQueries = GradientTileSize::kQueries;
  static constexpr int64_t kKeys = GradientTileSize::kKeys;

 public:
  GradientTile(const AttentionProblem& problem, const BackwardInputs& inputs)
      : p_(problem),
        inputs_(inputs),
        kernels_(microkernels<Real>()),
        keys_(kKeys * padded_columns(p_.head_dim)),
        keys_t_(p_.head_dim * kKeys),
        values_t_(p_.head_dim_v * kKeys),
        queries_(kQueries * padded_columns(p_.head_dim)),
        grad_out_(kQueries * padded_columns(p_.head_dim_v)),
        weights_(kQueries * kKeys),
        grad_scores_(kQueries * kKeys),
        grad_dots_(kQueries * kKeys),
        factors_(kKeys) {}

  void load_keys(int64_t batch, int64_t kv_head, const Sequence& sequence, Range keys) {
    keys_range_ = keys;
    const auto key = matrix(p_.key, batch, kv_head, sequence.k_begin, keys, p_.head_dim);
    const auto value = matrix(p_.value, batch, kv_head, sequence.k_begin, keys, p_.head_dim_v);
    pack(key, keys_.data());
    pack_transposed(key, keys_t_.data());
    pack_transposed(value, values_t_.data());
  }

  void load_queries(int64_t batch, int64_t head, const Sequence& sequence, Range rows) {
    rows_range_ = rows;
    pack(matrix(p_.query, batch, head, sequence.q_begin, rows, p_.head_dim), queries_.data());
    pack(matrix(inputs_.grad_out, batch, head, sequence.q_begin, rows, p_.head_dim_v),
         grad_out_.data());
  }

  // Fills weights, grad_scores and grad_dots for the loaded keys and queries. `deltas` holds the
  // row terms of the loaded rows.
  void compute(int64_t batch, int64_t head, const Sequence& sequence, const SequenceMask& mask,
               const Real* deltas) {
    const int64_t rows = rows_range_.size(), count = keys_range_.size(), stride = this->stride();
    kernels_.multiply({rows, stride, p_.head_dim, queries_.data(), padded_columns(p_.head_dim), 1,
                       keys_t_.data(), stride, weights_.data(), stride, Store::overwrite});
    kernels_.multiply({rows, stride, p_.head_dim_v, grad_out_.data(), padded_columns(p_.head_dim_v),
                       1, values_t_.data(), stride, grad_scores_.data(), stride, Store::overwrite});
    // Until it is multiplied by the score's gradient, grad_dots holds the slope of the score.
    ScoreTerms<Real>(p_, batch, head, mask)
        .apply(rows_range_, keys_range_, weights_.data(), stride, grad_dots_.data());

    const auto lse = inputs_.lse.as<const Real>();
    const auto lse_low = inputs_.lse_low.as<const Real>();
    const Real keep_scale = static_cast<Real>(p_.dropout.keep_scale());
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = sequence.q_begin + rows_range_.begin + r;
      const LogSumExp<Real> row_lse{*lse.at(batch, head, i),
                                    lse_low ? *lse_low.at(batch, head, i) : Real(0)};
      Real* weights = weights_.data() + r * stride;
      Real* grads = grad_scores_.data() + r * stride;
      Real* dots = grad_dots_.data() + r * stride;
      if (row_lse.high == kNegativeInfinity<Real>) {  // the row saw no key
        std::fill_n(weights, count, Real(0));
        std::fill_n(grads, count, Real(0));
        std::fill_n(dots, count, Real(0));
        continue;
      }
      kernels_.exp_row(weights, count, row_lse.high, row_lse.low);
      if (p_.dropout) {
        const DropoutStream stream = p_.dropout.stream(batch, p_.heads_q, head);
        dropout_factors(stream, rows_range_.begin + r, keys_range_, keep_scale, factors_.data());
        for (int64_t c = 0; c < count; ++c) {
          grads[c] = score_gradient(weights[c], grads[c], factors_[c], deltas[r]);
          weights[c] *= factors_[c];
        }
      } else {
        for (int64_t c = 0; c < count; ++c) {
          grads[c] = score_gradient(weights[c], grads[c], Real(1), deltas[r]);
        }
      }
      for (int64_t c = 0; c < count; ++c) dots[c] *= grads[c];
    }
  }

  // Row stride of the three results, (rows, keys) each.
  int64_t stride() const { return padded_columns(keys_range_.size()); }
  const Real* weights() const { return weights_.data(); }          // probabilities after dropout
  const Real* grad_scores() const { return grad_scores_.data(); }  // d loss / d score
  const Real* grad_dots() const { return grad_dots_.data(); }      // d loss / d (query * key)

  // The packed operands, (keys or queries, padded head dim).
  const Real* keys() const { return keys_.data(); }
  const Real* queries() const { return queries_.data(); }
  const Real* grad_out() const { return grad_out_.data(); }

 private:
  static StridedMatrix<const Element> matrix(const UntypedView4& view, int64_t batch, int64_t head,
                                             int64_t first_row, Range rows, int64_t columns) {
    const auto typed = view.as<const Element>();
    return {typed.at(batch, head, first_row + rows.begin), view.stride[2], view.stride[3],
            rows.size(), columns};
  }

  const AttentionProblem& p_;
  const BackwardInputs& inputs_;
  const Microkernels<Real>& kernels_;
  Range keys_range_{0, 0}, rows_range_{0, 0};
  Buffer<Real> keys_;         // (keys, padded head_dim)
  Buffer<Real> keys_t_;       // (head_dim, keys)
  Buffer<Real> values_t_;     // (head_dim_v, keys)
  Buffer<Real> queries_;      // (queries, padded head_dim)
  Buffer<Real> grad_out_;     // (queries, padded head_dim_v)
  Buffer<Real> weights_;      // (queries, keys)
  Buffer<Real> grad_scores_;  // (queries, keys)
  Buffer<Real> grad_dots_;    // (queries, keys)
  Buffer<Real> factors_;      // (keys)
};

}  // namespace flashattn::cpu
