// Attention in three materialised steps: scores, softmax, weighted sum. The same meaning as the
// fused kernels, written to be read; memory grows with len_q * len_k.
#include <algorithm>
#include <cmath>

#include "core/online_softmax.h"
#include "core/tile_schedule.h"
#include "cpu/attention.h"
#include "cpu/microkernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

// The matrices of one (batch, head), all of them whole.
template <class Element>
class NaiveKernel {
  using Real = Accumulator<Element>;

 public:
  explicit NaiveKernel(const AttentionProblem& problem)
      : p_(problem),
        kernels_(microkernels<Element>()),
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
    const int64_t depth = padded_depth<Real>(p_.head_dim);
    Buffer<Real> query(padded_columns(len_q_) * depth), keys_t(depth * stride_),
        scores(len_q_ * stride_, Buffer<Real>::Fill::zero);
    auto keys = matrix_of<const Element>(p_.key, batch, p_.kv_head(head));
    keys.rows = mask.len_k;  // what lies past the sequence is never read
    kernels_.pack_left(matrix_of<const Element>(p_.query, batch, head), query.data(), depth);
    kernels_.pack_right_transposed(keys, keys_t.data(), stride_);
    kernels_.dot_products({len_q_, padded_columns(mask.len_k), p_.head_dim, query.data(), depth,
                           keys_t.data(), stride_, scores.data(), stride_, Store::overwrite});
    kernels_.score_tile(ScoreTerms<Real>(p_, batch, head, mask), {0, len_q_}, {0, len_k_},
                        scores.data(), stride_, slopes);
    return scores;
  }

  void forward_head(int64_t batch, int64_t head, const NaiveOutputs& outputs) const {
    const SequenceMask mask = mask_of(batch);
    const Buffer<Real> scores = scores_of(batch, head, mask, nullptr);
    const auto lse = outputs.lse.as<Real>();
    const Real keep_scale = static_cast<Real>(p_.dropout.keep_scale());
    Buffer<Real> factors(stride_);
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
      for (int64_t j = 0; j < len_k_; ++j) row[j] *= state.inverse_sum();
      kernels_.store(row, stride_, Real(1),
                     rows_of<Element>(outputs.probs, batch, head, {i, i + 1}, len_k_));
      if (p_.dropout) {
        const DropoutStream stream = p_.dropout.stream(batch, p_.heads_q, head);
        kernels_.dropout_tile(stream, {i, i + 1}, {0, len_k_}, keep_scale, factors.data(), stride_);
        for (int64_t j = 0; j < len_k_; ++j) row[j] *= factors[j];
      }
      if (outputs.weights)
        kernels_.store(row, stride_, Real(1),
                       rows_of<Element>(outputs.weights, batch, head, {i, i + 1}, len_k_));
    }
    if (outputs.max_logits) {
      *outputs.max_logits.as<float>().at(batch, head) = static_cast<float>(max_logit);
    }

    // Step 3: out = weights * value.
    const int64_t value_stride = padded_columns(p_.head_dim_v);
    Buffer<Real> value(stride_ * value_stride), out(len_q_ * value_stride);
    auto values = matrix_of<const Element>(p_.value, batch, p_.kv_head(head));
    values.rows = mask.len_k;
    kernels_.pack_right(values, value.data(), value_stride);
    kernels_.multiply({len_q_, value_stride, mask.len_k, scores.data(), stride_, value.data(),
                       value_stride, out.data(), value_stride, Store::overwrite});
    kernels_.store(out.data(), value_stride, Real(1),
                   rows_of<Element>(outputs.out, batch, head, {0, len_q_}, p_.head_dim_v));
  }

  void backward_group(int64_t batch, int64_t kv_head, const NaiveBackwardInputs& inputs,
                      const BackwardOutputs& outputs) const {
    const SequenceMask mask = mask_of(batch);
    const int64_t depth = padded_depth<Real>(p_.head_dim);
    const int64_t depth_v = padded_depth<Real>(p_.head_dim_v);
    const int64_t rows = padded_columns(len_q_);
    constexpr auto kZero = Buffer<Real>::Fill::zero;
    // Zeros stand for the keys past the sequence, which are never read. Gradients of keys are made
    // transposed: (head_dim, len_k).
    Buffer<Real> key(stride_ * depth, kZero), values_t(depth_v * stride_, kZero),
        query_t(depth * rows), grad_out(rows * depth_v), grad_out_t(depth_v * rows),
        weights(len_q_ * stride_), slopes(len_q_ * stride_), grads(len_q_ * stride_),
        grad_query(len_q_ * depth), factors(stride_), grad_key_t(depth * stride_, kZero),
        grad_value_t(depth_v * stride_, kZero);
    auto keys = matrix_of<const Element>(p_.key, batch, kv_head);
    auto values = matrix_of<const Element>(p_.value, batch, kv_head);
    keys.rows = values.rows = mask.len_k;
    kernels_.pack_right(keys, key.data(), depth);
    kernels_.pack_right_transposed(values, values_t.data(), stride_);

    const int64_t first = kv_head * p_.group_size();
    for (int64_t head = first; head < first + p_.group_size(); ++head) {
      if (p_.softcap > 0) scores_of(batch, head, mask, slopes.data());
      const auto head_query = matrix_of<const Element>(p_.query, batch, head);
      const auto head_grad_out = matrix_of<const Element>(inputs.grad_out, batch, head);
      kernels_.pack_left_transposed(head_query, query_t.data(), rows);
      kernels_.pack_left(head_grad_out, grad_out.data(), depth_v);
      kernels_.pack_left_transposed(head_grad_out, grad_out_t.data(), rows);
      kernels_.dot_products({len_q_, stride_, p_.head_dim_v, grad_out.data(), depth_v,
                             values_t.data(), stride_, grads.data(), stride_, Store::overwrite});
      for (int64_t i = 0; i < len_q_; ++i) {
        gradient_row(batch, head, i, inputs, outputs, factors.data(), weights.data() + i * stride_,
                     grads.data() + i * stride_);
      }
      add_shared_gradients(batch, head, mask, grads.data(), outputs);
      const Real scale = static_cast<Real>(p_.scale);
      for (int64_t i = 0; i < len_q_ * stride_; ++i) {
        grads[i] *= p_.softcap > 0 ? scale * slopes[i] : scale;
      }

      kernels_.multiply({p_.head_dim_v, stride_, len_q_, grad_out_t.data(), rows, weights.data(),
                         stride_, grad_value_t.data(), stride_, Store::accumulate});
      kernels_.multiply({p_.head_dim, stride_, len_q_, query_t.data(), rows, grads.data(), stride_,
                         grad_key_t.data(), stride_, Store::accumulate});
      kernels_.multiply({len_q_, depth, len_k_, grads.data(), stride_, key.data(), depth,
                         grad_query.data(), depth, Store::overwrite});
      if (outputs.grad_query) {
        kernels_.store(grad_query.data(), depth, Real(1),
                       rows_of<Element>(outputs.grad_query, batch, head, {0, len_q_}, p_.head_dim));
      }
    }
    if (outputs.grad_key) {
      kernels_.store_transposed(
          grad_key_t.data(), stride_, Real(1),
          rows_of<Element>(outputs.grad_key, batch, kv_head, {0, len_k_}, p_.head_dim));
    }
    if (outputs.grad_value) {
      kernels_.store_transposed(
          grad_value_t.data(), stride_, Real(1),
          rows_of<Element>(outputs.grad_value, batch, kv_head, {0, len_k_}, p_.head_dim_v));
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
      kernels_.dropout_tile(p_.dropout.stream(batch, p_.heads_q, head), {i, i + 1}, {0, len_k_},
                            static_cast<Real>(p_.dropout.keep_scale()), factors, stride_);
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
  const Microkernels<Element>& kernels_;
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
