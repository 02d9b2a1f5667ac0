// Attention in three materialised steps: scores, softmax, weighted sum. The same meaning as the
// fused kernels, written to be read; memory grows with len_q * len_k.
#include <algorithm>
#include <cmath>

#include "core/online_softmax.h"
#include "core/tile_schedule.h"
#include "cpu/attention.h"
#include "cpu/microkernels.h"
#include "cpu/pack.h"
#include "cpu/parallel.h"
#include "cpu/score_terms.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

template <class Element>
StridedMatrix<const Element> matrix_of(const UntypedView4& view, int64_t batch, int64_t head) {
  return {view.as<const Element>().at(batch, head), view.stride[2], view.stride[3], view.size[2],
          view.size[3]};
}

template <class Real, class Element>
void store_matrix(const Buffer<Real>& packed, int64_t rows, const UntypedView4& view, int64_t batch,
                  int64_t head) {
  const auto to = view.as<Element>();
  for (int64_t r = 0; r < rows; ++r) {
    store_row(packed.data() + r * padded_columns(view.size[3]), view.size[3], Real(1),
              to.at(batch, head, r), to.stride[3]);
  }
}

// The matrices of one (batch, head), all of them whole.
template <class Element>
class NaiveKernel {
  using Real = Accumulator<Element>;

 public:
  explicit NaiveKernel(const AttentionProblem& problem)
      : p_(problem),
        kernels_(microkernels<Real>()),
        len_q_(problem.sequences.storage_q),
        len_k_(problem.sequences.storage_k),
        stride_(padded_columns(len_k_)) {}

  void forward(const NaiveOutputs& outputs) const {
    const TaskGrid grid{p_.sequences.count, p_.heads_q, 1};
    parallel_for_each(grid.count(), [&](int64_t index) {
      forward_head(grid[index].batch, grid[index].head, outputs);
    });
  }

  // grad_mask, grad_alibi and grad_sinks are sums over heads and batches: they, and the gradients
  // of a kv head, are added in order by one task each kv head and then over the batch.
  void backward(const NaiveBackwardInputs& inputs, const BackwardOutputs& outputs) const {
    const bool shared = outputs.grad_mask || outputs.grad_alibi || outputs.grad_sinks;
    const TaskGrid grid{p_.sequences.count, p_.heads_kv, 1};
    const auto body = [&](int64_t index) {
      backward_group(grid[index].batch, grid[index].head, inputs, outputs);
    };
    if (shared) {
      for (int64_t index = 0; index < grid.count(); ++index) body(index);
    } else {
      parallel_for_each(grid.count(), body);
    }
  }

 private:
  SequenceMask mask_of(int64_t batch) const {
    const Sequence sequence = p_.sequences[batch];
    return p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
  }

  // Step 1 for all rows: scores (len_q, padded len_k), and their slopes if wanted.
  Buffer<Real> scores_of(int64_t batch, int64_t head, const SequenceMask& mask,
                         Real* slopes) const {
    const int64_t depth = padded_columns(p_.head_dim);
    Buffer<Real> query(len_q_ * depth), keys_t(p_.head_dim * stride_), scores(len_q_ * stride_);
    pack(matrix_of<Element>(p_.query, batch, head), query.data());
    auto keys = matrix_of<Element>(p_.key, batch, p_.kv_head(head));
    const int64_t stride = padded_columns(mask.len_k);
    keys.rows = mask.len_k;  // what lies past the sequence is never read
    Buffer<Real> dots(len_q_ * stride);
    pack_transposed(keys, keys_t.data());
    kernels_.multiply({len_q_, stride, p_.head_dim, query.data(), depth, 1, keys_t.data(), stride,
                       dots.data(), stride, Store::overwrite});
    for (int64_t i = 0; i < len_q_; ++i) {
      std::copy_n(dots.data() + i * stride, mask.len_k, scores.data() + i * stride_);
      std::fill_n(scores.data() + i * stride_ + mask.len_k, stride_ - mask.len_k, Real(0));
    }
    ScoreTerms<Real>(p_, batch, head, mask)
        .apply({0, len_q_}, {0, len_k_}, scores.data(), stride_, slopes);
    return scores;
  }

  void forward_head(int64_t batch, int64_t head, const NaiveOutputs& outputs) const {
    const SequenceMask mask = mask_of(batch);
    const Buffer<Real> scores = scores_of(batch, head, mask, nullptr);
    const auto lse = outputs.lse.as<Real>();
    const auto probs = outputs.probs.as<Element>();
    const auto weights = outputs.weights.as<Element>();
    const Real keep_scale = static_cast<Real>(p_.dropout.keep_scale());
    Buffer<Real> factors(len_k_);
    Real max_logit = kNegativeInfinity<Real>;

    // Step 2: softmax of each row, then dropout.
    for (int64_t i = 0; i < len_q_; ++i) {
      Real* row = scores.data() + i * stride_;
      OnlineSoftmax<Real> state;
      state.max = kernels_.row_max(row, len_k_);
      max_logit = std::max(max_logit, state.max);
      if (p_.sinks) state.raise_max(*p_.sinks.as<const Real>().at(0, head));
      const Real subtract = OnlineSoftmax<Real>::finite_or_zero(state.max);
      state.sum = kernels_.exp_row(row, len_k_, subtract, Real(0));
      if (std::isnan(state.sum)) max_logit = state.sum;
      if (p_.sinks) state.sum += exponential(*p_.sinks.as<const Real>().at(0, head) - subtract);
      *lse.at(batch, head, i) = state.log_sum_exp().high;
      kernels_.scale_row(row, len_k_, state.inverse_sum());
      store_row(row, len_k_, Real(1), probs.at(batch, head, i), probs.stride[3]);
      if (p_.dropout) {
        const DropoutStream stream = p_.dropout.stream(batch, p_.heads_q, head);
        dropout_factors(stream, i, {0, len_k_}, keep_scale, factors.data());
        for (int64_t j = 0; j < len_k_; ++j) row[j] *= factors[j];
      }
      if (weights) store_row(row, len_k_, Real(1), weights.at(batch, head, i), weights.stride[3]);
    }
    if (outputs.max_logits) {
      *outputs.max_logits.as<float>().at(batch, head) = static_cast<float>(max_logit);
    }

    // Step 3: out = weights * value.
    const int64_t value_stride = padded_columns(p_.head_dim_v);
    Buffer<Real> value(len_k_ * value_stride), out(len_q_ * value_stride);
    auto values = matrix_of<Element>(p_.value, batch, p_.kv_head(head));
    values.rows = mask.len_k;
    pack(values, value.data());
    kernels_.multiply({len_q_, value_stride, mask.len_k, scores.data(), stride_, 1, value.data(),
                       value_stride, out.data(), value_stride, Store::overwrite});
    store_matrix<Real, Element>(out, len_q_, outputs.out, batch, head);
  }

  void backward_group(int64_t batch, int64_t kv_head, const NaiveBackwardInputs& inputs,
                      const BackwardOutputs& outputs) const {
    const SequenceMask mask = mask_of(batch);
    const int64_t depth = padded_columns(p_.head_dim), value_depth = padded_columns(p_.head_dim_v);
    Buffer<Real> key(len_k_ * depth), values_t(p_.head_dim_v * stride_), query(len_q_ * depth),
        grad_out(len_q_ * value_depth), weights(len_q_ * stride_), slopes(len_q_ * stride_),
        grads(len_q_ * stride_), grad_query(len_q_ * depth), factors(len_k_),
        grad_key(len_k_ * depth, Buffer<Real>::Fill::zero),
        grad_value(len_k_ * value_depth, Buffer<Real>::Fill::zero);
    // What lies past the sequence is never read; zeros stand for it.
    auto keys = matrix_of<Element>(p_.key, batch, kv_head);
    auto values = matrix_of<Element>(p_.value, batch, kv_head);
    keys.rows = values.rows = mask.len_k;
    std::fill_n(key.data(), len_k_ * depth, Real(0));
    pack(keys, key.data());
    Buffer<Real> value(len_k_ * value_depth, Buffer<Real>::Fill::zero);
    pack(values, value.data());
    pack_transposed<Real, Real>({value.data(), value_depth, 1, len_k_, p_.head_dim_v},
                                values_t.data());

    const int64_t first = kv_head * p_.group_size();
    for (int64_t head = first; head < first + p_.group_size(); ++head) {
      const Buffer<Real> scores = scores_of(batch, head, mask, slopes.data());
      pack(matrix_of<Element>(p_.query, batch, head), query.data());
      pack(matrix_of<Element>(inputs.grad_out, batch, head), grad_out.data());
      kernels_.multiply({len_q_, stride_, p_.head_dim_v, grad_out.data(), value_depth, 1,
                         values_t.data(), stride_, grads.data(), stride_, Store::overwrite});
      for (int64_t i = 0; i < len_q_; ++i) {
        gradient_row(batch, head, i, inputs, outputs, factors.data(), weights.data() + i * stride_,
                     grads.data() + i * stride_);
      }
      add_shared_gradients(batch, head, mask, grads.data(), outputs);
      for (int64_t i = 0; i < len_q_ * stride_; ++i) grads[i] *= slopes[i];

      kernels_.multiply({len_k_, value_depth, len_q_, weights.data(), 1, stride_, grad_out.data(),
                         value_depth, grad_value.data(), value_depth, Store::accumulate});
      kernels_.multiply({len_k_, depth, len_q_, grads.data(), 1, stride_, query.data(), depth,
                         grad_key.data(), depth, Store::accumulate});
      kernels_.multiply({len_q_, depth, len_k_, grads.data(), stride_, 1, key.data(), depth,
                         grad_query.data(), depth, Store::overwrite});
      if (outputs.grad_query)
        store_matrix<Real, Element>(grad_query, len_q_, outputs.grad_query, batch, head);
    }
    if (outputs.grad_key)
      store_matrix<Real, Element>(grad_key, len_k_, outputs.grad_key, batch, kv_head);
    if (outputs.grad_value) {
      store_matrix<Real, Element>(grad_value, len_k_, outputs.grad_value, batch, kv_head);
    }
  }

  // From the saved probabilities of a row: `weights` after dropout, and `grads`, which arrives as
  // d loss / d weight, becomes d loss / d score.
  void gradient_row(int64_t batch, int64_t head, int64_t i, const NaiveBackwardInputs& inputs,
                    const BackwardOutputs& outputs, Real* factors, Real* weights,
                    Real* grads) const {
    const auto probs = inputs.probs.as<const Element>();
    const auto grad_weights = inputs.grad_weights.as<const Element>();
    std::fill_n(factors, len_k_, Real(1));
    if (p_.dropout) {
      dropout_factors(p_.dropout.stream(batch, p_.heads_q, head), i, {0, len_k_},
                      static_cast<Real>(p_.dropout.keep_scale()), factors);
    }
    const Real lse = *inputs.lse.as<const Real>().at(batch, head, i);
    if (lse == kNegativeInfinity<Real>) {
      std::fill_n(weights, stride_, Real(0));
      std::fill_n(grads, stride_, Real(0));
      return;
    }
    Real delta = 0;
    for (int64_t j = 0; j < len_k_; ++j) {
      const Real probability = convert<Real>(*probs.at(batch, head, i, j));
      if (grad_weights) grads[j] += convert<Real>(*grad_weights.at(batch, head, i, j));
      weights[j] = probability * factors[j];
      delta += weights[j] * grads[j];
    }
    if (inputs.grad_lse) delta -= *inputs.grad_lse.as<const Real>().at(batch, head, i);
    for (int64_t j = 0; j < len_k_; ++j) {
      const Real probability = convert<Real>(*probs.at(batch, head, i, j));
      grads[j] = score_gradient(probability, grads[j], factors[j], delta);
    }
    std::fill(weights + len_k_, weights + stride_, Real(0));
    std::fill(grads + len_k_, grads + stride_, Real(0));
    if (outputs.grad_sinks) {
      const Real sink = *p_.sinks.as<const Real>().at(0, head);
      *outputs.grad_sinks.as<Real>().at(0, head) -=
          flashattn::probability(sink, LogSumExp<Real>{lse, Real(0)}) * delta;
    }
  }

  void add_shared_gradients(int64_t batch, int64_t head, const SequenceMask& mask,
                            const Real* grads, const BackwardOutputs& outputs) const {
    const auto grad_mask = outputs.grad_mask.as<Real>();
    Real grad_alibi = 0;
    for (int64_t i = 0; i < len_q_; ++i) {
      for (int64_t j = 0; j < len_k_; ++j) {
        const Real grad = grads[i * stride_ + j];
        grad_alibi += grad * alibi_distance<Real>(i, mask.shift, j);
        if (grad_mask) {
          const int64_t* size = grad_mask.size;
          *grad_mask.at(size[0] > 1 ? batch : 0, size[1] > 1 ? head : 0, size[2] > 1 ? i : 0,
                        size[3] > 1 ? j : 0) += grad;
        }
      }
    }
    if (outputs.grad_alibi) *outputs.grad_alibi.as<Real>().at(batch, head) += grad_alibi;
  }

  const AttentionProblem& p_;
  const Microkernels<Real>& kernels_;
  const int64_t len_q_, len_k_, stride_;
};

}  // namespace

void naive_forward(const AttentionProblem& problem, const NaiveOutputs& outputs) {
  with_element(problem.dtype,
               [&](auto element) { NaiveKernel<decltype(element)>(problem).forward(outputs); });
}

void naive_backward(const AttentionProblem& problem, const NaiveBackwardInputs& inputs,
                    const BackwardOutputs& outputs) {
  with_element(problem.dtype, [&](auto element) {
    NaiveKernel<decltype(element)>(problem).backward(inputs, outputs);
  });
}

}  // namespace flashattn::cpu
