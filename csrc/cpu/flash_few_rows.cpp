// Flash attention forward for a few rows of queries, as in decoding: the time goes into reading keys
// and values. They are read once, as they lie, for all rows of a kv group together; and split over
// tasks, so that one head can use all cores. Partial results are merged in the order of the keys.
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

template <class Element>
class FewRowsKernel {
  using Real = Accumulator<Element>;
  static constexpr int64_t kKeys = 256;         // of a tile, whose scores stay in the L1 cache
  static constexpr int64_t kWantedTasks = 64;   // enough for the cores of a large machine
  static constexpr int64_t kScoreStride = spread_stride(kKeys);

 public:
  FewRowsKernel(const AttentionProblem& problem, const ForwardOutputs& outputs)
      : p_(problem),
        outputs_(outputs),
        kernels_(microkernels<Element>()),
        len_q_(p_.sequences.max_len_q),
        query_stride_(padded_columns(p_.head_dim)),
        out_stride_(padded_columns(p_.head_dim_v)) {
    const int64_t longest = std::max<int64_t>(p_.sequences.max_len_k, 1);
    const int64_t whole = std::max<int64_t>(p_.sequences.count * p_.heads_kv, 1);
    const int64_t splits = std::clamp<int64_t>(kWantedTasks / whole, 1, divide_up(longest, kKeys));
    split_keys_ = round_up(divide_up(longest, splits), kKeys);
    splits_ = divide_up(longest, split_keys_);
    const int64_t partials = p_.sequences.count * p_.heads_q * len_q_ * splits_;
    partial_out_ = Buffer<Real>(partials * out_stride_);
    states_ = Buffer<OnlineSoftmax<Real>>(partials);
    max_logits_ = Buffer<Real>(p_.sequences.count * p_.heads_q * splits_);
  }

  void run() {
    const TaskGrid splits{p_.sequences.count, p_.heads_kv, splits_};
    parallel_for_each(
        splits.count(), [&] { return Scratch(*this); },
        [&](int64_t index, Scratch& scratch) { run_split(splits[index], scratch); });
    const TaskGrid heads{p_.sequences.count, p_.heads_q, 1};
    parallel_for_each(heads.count(),
                      [&](int64_t index) { merge(heads[index].batch, heads[index].head); });
  }

 private:
  struct Scratch {
    Buffer<Real> queries;  // (group's rows, padded head_dim)
    Buffer<Real> scores;   // (group's rows, kKeys)
    Buffer<Real> factors;  // (rows of a head, kKeys), with dropout only

    explicit Scratch(const FewRowsKernel& k)
        : queries(padded_columns(k.p_.group_size() * k.len_q_) * k.query_stride_),
          scores(k.p_.group_size() * k.len_q_ * kScoreStride),
          factors(k.p_.dropout ? k.len_q_ * kScoreStride : 0) {}
  };

  void run_split(Task task, Scratch& s) const {
    const Sequence sequence = p_.sequences[task.batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const Range rows{0, sequence.len_q};
    const int64_t first = task.head * p_.group_size(), last = first + p_.group_size();
    for (int64_t head = first; head < last; ++head) begin_head(task, sequence, head, s);

    const Range split{task.part * split_keys_, (task.part + 1) * split_keys_};
    const Tiles tiles = aligned_tiles(mask.keys_for(rows).overlap(split), kKeys);
    const int64_t all_rows = p_.group_size() * rows.size();
    for (int64_t t = 0; t < tiles.count(); ++t) {
      const Range keys = tiles[t], stored = keys.moved(sequence.k_begin);
      kernels_.dots_in_place(
          {s.queries.data(), query_stride_, 1, all_rows, p_.head_dim},
          rows_of<const Element>(p_.key, task.batch, task.head, stored, p_.head_dim),
          s.scores.data(), kScoreStride);
      for (int64_t head = first; head < last; ++head) {
        softmax_step(task, mask, rows, keys, head, head - first, s);
      }
      const auto values =
          rows_of<const Element>(p_.value, task.batch, task.head, stored, p_.head_dim_v);
      for (int64_t head = first; head < last; ++head) {
        const Real* weights = s.scores.data() + (head - first) * rows.size() * kScoreStride;
        kernels_.weighted_sums_in_place({weights, kScoreStride, 1, rows.size(), keys.size()},
                                        values, out_of(task, head), out_stride_);
      }
    }
  }

  void begin_head(Task task, const Sequence& sequence, int64_t head, Scratch& s) const {
    const int64_t slot = head - task.head * p_.group_size();
    const Range rows{0, sequence.len_q};
    const auto query = rows_of<const Element>(p_.query, task.batch, head,
                                              rows.moved(sequence.q_begin), p_.head_dim);
    // Packing pads with rows of zeros, which the next head overwrites.
    kernels_.pack_left(query, s.queries.data() + slot * rows.size() * query_stride_, query_stride_);
    // A sink is one more term of the sum, without a value.
    OnlineSoftmax<Real> empty;
    if (p_.sinks && task.part == 0) empty.add(*p_.sinks.as<const Real>().at(0, head));
    if (empty.max == kNegativeInfinity<Real>) empty = {};
    std::fill_n(states_of(task, head), len_q_, empty);
    std::fill_n(out_of(task, head), len_q_ * out_stride_, Real(0));
    max_logits_[(task.batch * p_.heads_q + head) * splits_ + task.part] = kNegativeInfinity<Real>;
  }

  void softmax_step(Task task, const SequenceMask& mask, Range rows, Range keys, int64_t head,
                    int64_t slot, Scratch& s) const {
    const ScoreTerms<Real> terms(p_, task.batch, head, mask);
    if (p_.dropout) {
      kernels_.dropout_tile(p_.dropout.stream(task.batch, p_.heads_q, head), rows, keys, Real(1),
                            s.factors.data(), kScoreStride);
    }
    Real* scores = s.scores.data() + slot * rows.size() * kScoreStride;
    const Real max = kernels_.softmax_step({&terms, rows, keys, scores, kScoreStride,
                                            s.factors.data(), states_of(task, head),
                                            out_of(task, head), out_stride_, out_stride_, scores,
                                            kScoreStride});
    Real& largest = max_logits_[(task.batch * p_.heads_q + head) * splits_ + task.part];
    largest = std::max(largest, max);
  }

  // Joins the splits of one head's rows.
  void merge(int64_t batch, int64_t head) const {
    const Sequence sequence = p_.sequences[batch];
    const Real keep_scale = p_.dropout ? static_cast<Real>(p_.dropout.keep_scale()) : Real(1);
    const Real* maxima = &max_logits_[(batch * p_.heads_q + head) * splits_];
    Real max_logit = kNegativeInfinity<Real>;
    for (int64_t split = 0; split < splits_; ++split) {
      max_logit = std::max(max_logit, maxima[split]);
    }
    for (int64_t i = 0; i < sequence.len_q; ++i) {
      const auto part = [&](int64_t split) { return Task{batch, head, split}; };
      OnlineSoftmax<Real> state = states_of(part(0), head)[i];
      for (int64_t split = 1; split < splits_; ++split) {
        state.merge(states_of(part(split), head)[i]);
      }
      Real* sum = out_of(part(0), head) + i * out_stride_;
      for (int64_t split = 0; split < splits_; ++split) {
        const Real max = states_of(part(split), head)[i].max;
        const Real factor =
            exponential(max - OnlineSoftmax<Real>::finite_or_zero(state.max));
        const Real* out = out_of(part(split), head) + i * out_stride_;
        for (int64_t c = 0; c < out_stride_; ++c) {
          sum[c] = (split ? sum[c] : Real(0)) + out[c] * factor;
        }
      }
      if (std::isnan(state.sum)) max_logit = state.sum;  // a maximum passes over NaN
      store_row(batch, head, sequence.q_begin + i, state, sum, state.inverse_sum() * keep_scale);
    }
    if (outputs_.max_logits) {
      *outputs_.max_logits.as<float>().at(batch, head) = static_cast<float>(max_logit);
    }
  }

  void store_row(int64_t batch, int64_t head, int64_t row, const OnlineSoftmax<Real>& state,
                 const Real* sum, Real factor) const {
    const Range stored{row, row + 1};
    kernels_.store(sum, out_stride_, factor,
                   rows_of<Element>(outputs_.out, batch, head, stored, p_.head_dim_v));
    if (outputs_.out_low) {
      kernels_.store_rounding(
          sum, out_stride_, factor,
          rows_of<Element>(outputs_.out_low, batch, head, stored, p_.head_dim_v));
    }
    const LogSumExp<Real> lse = state.log_sum_exp();
    *outputs_.lse.as<Real>().at(batch, head, row) = lse.high;
    if (outputs_.lse_low) *outputs_.lse_low.as<Real>().at(batch, head, row) = lse.low;
  }

  // The rows of one head in one split (task.part); task.head is not looked at.
  int64_t partial(Task task, int64_t head) const {
    return ((task.batch * p_.heads_q + head) * splits_ + task.part) * len_q_;
  }
  Real* out_of(Task task, int64_t head) const {
    return partial_out_.data() + partial(task, head) * out_stride_;
  }
  OnlineSoftmax<Real>* states_of(Task task, int64_t head) const {
    return states_.data() + partial(task, head);
  }

  const AttentionProblem& p_;
  const ForwardOutputs& outputs_;
  const Microkernels<Element>& kernels_;
  const int64_t len_q_, query_stride_, out_stride_;
  int64_t splits_, split_keys_;
  Buffer<Real> partial_out_;             // (batch, heads_q, splits, len_q, padded head_dim_v)
  Buffer<OnlineSoftmax<Real>> states_;   // (batch, heads_q, splits, len_q)
  Buffer<Real> max_logits_;              // (batch, heads_q, splits)
};

}  // namespace

bool few_rows(const AttentionProblem& p) {
  constexpr int64_t kFewRows = 16, kLongQueries = 8;
  return p.group_size() * p.sequences.max_len_q <= kFewRows &&
         p.sequences.max_len_q <= kLongQueries && p.key.stride[3] == 1 && p.value.stride[3] == 1;
}

void flash_forward_few_rows(const AttentionProblem& problem, const ForwardOutputs& outputs) {
  with_element(problem.dtype, [&](auto element) {
    FewRowsKernel<decltype(element)>(problem, outputs).run();
  });
}

}  // namespace flashattn::cpu
