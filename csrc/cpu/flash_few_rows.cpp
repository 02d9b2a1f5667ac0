// Flash attention forward for a few rows of queries, as in decoding: the time goes into reading
// keys and values. They are read once, as they lie, for all rows that share a kv head; and split
// over tasks (Dao et al., "Flash-Decoding", 2023), so that one head can use all cores. Partial
// results are merged in the order of the keys. The split depends on nothing but the keys'
// positions.
#include "cpu/flash_few_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

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
  static constexpr int64_t kKeys = 256;       // of a tile, whose scores stay in the L1 cache
  static constexpr int64_t kSplitKeys = 512;  // of a task
  static constexpr int64_t kScoreStride = spread_stride(kKeys);

 public:
  FewRowsKernel(const AttentionProblem& problem, const ForwardOutputs& outputs)
      : p_(problem),
        outputs_(outputs),
        kernels_(microkernels<Element>()),
        group_rows_(p_.group_size() * p_.sequences.max_len_q),
        query_stride_(padded_columns(p_.head_dim)),
        out_stride_(padded_columns(p_.head_dim_v)) {
    const int64_t splits = divide_up(std::max<int64_t>(p_.sequences.max_len_k, 1), kSplitKeys);
    splits_ = {p_.sequences.count, p_.heads_kv, splits};
    partial_out_ = Buffer<Real>(splits_.count() * group_rows_ * out_stride_);
    states_ = Buffer<OnlineSoftmax<Real>>(splits_.count() * group_rows_);
    max_logits_ = Buffer<Real>(splits_.count() * p_.group_size());
    finished_.reset(new std::atomic<int64_t>[splits_.batch * splits_.heads]());
  }

  void run() {
    parallel_for_each(
        splits_.count(), [&] { return Scratch(*this); },
        [&](int64_t index, Scratch& scratch) {
          run_split(index, scratch);
          // Whoever is the last of a group joins its splits.
          std::atomic<int64_t>& finished = finished_[index / splits_.parts];
          if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == splits_.parts) {
            merge_group(splits_[index]);
          }
        });
  }

 private:
  struct Scratch {
    Buffer<Real> queries;  // (group's rows, padded head_dim)
    Buffer<Real> scores;   // (group's rows, kKeys)
    Buffer<Real> factors;  // (rows of a head, kKeys), with dropout only

    explicit Scratch(const FewRowsKernel& k)
        : queries((k.group_rows_ + kColumnMultiple) * k.query_stride_),
          scores(k.group_rows_ * kScoreStride),
          factors(k.p_.dropout ? k.p_.sequences.max_len_q * kScoreStride : 0) {}
  };

  // Rows are those of the group's heads, one head after the other.
  void run_split(int64_t index, Scratch& s) const {
    const Task task = splits_[index];
    const Sequence sequence = p_.sequences[task.batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const int64_t rows = p_.group_size() * sequence.len_q;
    begin(index, sequence, s);

    const Range split{task.part * kSplitKeys, (task.part + 1) * kSplitKeys};
    const Range seen = mask.keys_for({0, sequence.len_q}).overlap(split);
    const Tiles tiles = aligned_tiles(seen, kKeys);
    for (int64_t t = 0; t < tiles.count(); ++t) {
      const Range keys = tiles[t], stored = keys.moved(sequence.k_begin);
      kernels_.dots_in_place(
          {s.queries.data(), query_stride_, 1, rows, p_.head_dim},
          rows_of<const Element>(p_.key, task.batch, task.head, stored, p_.head_dim),
          s.scores.data(), kScoreStride);
      for (int64_t slot = 0; slot < p_.group_size(); ++slot) {
        softmax_step(index, slot, mask, keys, s);
      }
      kernels_.weighted_sums_in_place(
          {s.scores.data(), kScoreStride, 1, rows, keys.size()},
          rows_of<const Element>(p_.value, task.batch, task.head, stored, p_.head_dim_v),
          out_of(index), out_stride_);
    }
  }

  void begin(int64_t index, const Sequence& sequence, Scratch& s) const {
    const Task task = splits_[index];
    std::fill_n(out_of(index), group_rows_ * out_stride_, Real(0));
    for (int64_t slot = 0; slot < p_.group_size(); ++slot) {
      const int64_t head = task.head * p_.group_size() + slot, row = slot * sequence.len_q;
      const Range stored{sequence.q_begin, sequence.q_begin + sequence.len_q};
      // Packing pads with rows of zeros, which the next head overwrites.
      kernels_.pack_left(rows_of<const Element>(p_.query, task.batch, head, stored, p_.head_dim),
                         s.queries.data() + row * query_stride_, query_stride_);
      // A sink is one more term of the sum, without a value.
      OnlineSoftmax<Real> empty;
      if (p_.sinks && task.part == 0) empty.add(*p_.sinks.as<const Real>().at(0, head));
      if (empty.max == kNegativeInfinity<Real>) empty = {};
      std::fill_n(states_of(index) + row, sequence.len_q, empty);
      max_logits_[index * p_.group_size() + slot] = kNegativeInfinity<Real>;
    }
  }

  void softmax_step(int64_t index, int64_t slot, const SequenceMask& mask, Range keys,
                    Scratch& s) const {
    const Task task = splits_[index];
    const int64_t head = task.head * p_.group_size() + slot, row = slot * mask.len_q;
    const Range rows{0, mask.len_q};
    const ScoreTerms<Real> terms(p_, task.batch, head, mask);
    if (p_.dropout) {
      kernels_.dropout_tile(p_.dropout.stream(task.batch, p_.heads_q, head), rows, keys, Real(1),
                            s.factors.data(), kScoreStride);
    }
    Real* scores = s.scores.data() + row * kScoreStride;
    const Real max =
        kernels_.softmax_step({&terms, rows, keys, scores, kScoreStride, s.factors.data(),
                               states_of(index) + row, out_of(index) + row * out_stride_,
                               out_stride_, out_stride_, scores, nullptr, kScoreStride});
    Real& largest = max_logits_[index * p_.group_size() + slot];
    largest = std::max(largest, max);
  }

  // Joins the splits of the rows that share a kv head.
  void merge_group(Task group) const {
    const Sequence sequence = p_.sequences[group.batch];
    const int64_t first = (group.batch * splits_.heads + group.head) * splits_.parts;
    for (int64_t slot = 0; slot < p_.group_size(); ++slot) {
      const int64_t head = group.head * p_.group_size() + slot;
      Real max_logit = kNegativeInfinity<Real>;
      for (int64_t split = first; split < first + splits_.parts; ++split) {
        max_logit = std::max(max_logit, max_logits_[split * p_.group_size() + slot]);
      }
      for (int64_t i = 0; i < sequence.len_q; ++i) {
        const OnlineSoftmax<Real> state = merge_row(first, slot * sequence.len_q + i);
        if (std::isnan(state.sum)) max_logit = state.sum;  // a maximum passes over NaN
        store_row(group.batch, head, sequence.q_begin + i, state,
                  out_of(first) + (slot * sequence.len_q + i) * out_stride_);
      }
      if (outputs_.max_logits) {
        *outputs_.max_logits.as<float>().at(group.batch, head) = static_cast<float>(max_logit);
      }
    }
  }

  // Leaves the sum of the splits' outputs in the first split's.
  OnlineSoftmax<Real> merge_row(int64_t first, int64_t row) const {
    OnlineSoftmax<Real> state = states_of(first)[row];
    for (int64_t split = first + 1; split < first + splits_.parts; ++split) {
      state.merge(states_of(split)[row]);
    }
    if (splits_.parts == 1) return state;
    Real* sum = out_of(first) + row * out_stride_;
    for (int64_t split = first; split < first + splits_.parts; ++split) {
      const Real max = states_of(split)[row].max;
      const Real factor = exponential(max - OnlineSoftmax<Real>::finite_or_zero(state.max));
      const Real* out = out_of(split) + row * out_stride_;
      for (int64_t c = 0; c < out_stride_; ++c) {
        sum[c] = split == first ? out[c] * factor : sum[c] + out[c] * factor;
      }
    }
    return state;
  }

  void store_row(int64_t batch, int64_t head, int64_t row, const OnlineSoftmax<Real>& state,
                 const Real* sum) const {
    const Range stored{row, row + 1};
    const Real keep_scale = p_.dropout ? static_cast<Real>(p_.dropout.keep_scale()) : Real(1);
    const Real factor = state.inverse_sum() * keep_scale;
    kernels_.store(sum, out_stride_, factor,
                   rows_of<Element>(outputs_.out, batch, head, stored, p_.head_dim_v));
    *outputs_.lse.as<Real>().at(batch, head, row) = state.log_sum_exp().high;
  }

  Real* out_of(int64_t split) const {
    return partial_out_.data() + split * group_rows_ * out_stride_;
  }
  OnlineSoftmax<Real>* states_of(int64_t split) const {
    return states_.data() + split * group_rows_;
  }

  const AttentionProblem& p_;
  const ForwardOutputs& outputs_;
  const Microkernels<Element>& kernels_;
  const int64_t group_rows_;  // of the longest sequence
  const int64_t query_stride_, out_stride_;
  TaskGrid splits_;                                   // head = kv head, part = split
  Buffer<Real> partial_out_;                          // (splits, group's rows, padded head_dim_v)
  Buffer<OnlineSoftmax<Real>> states_;                // (splits, group's rows)
  Buffer<Real> max_logits_;                           // (splits, heads of the group)
  std::unique_ptr<std::atomic<int64_t>[]> finished_;  // (batch, kv heads): how many splits are
};

}  // namespace

bool is_for_few_rows(const AttentionProblem& problem, const ForwardOutputs& outputs) {
  constexpr int64_t kFewRows = 16, kFewQueries = 8;
  return !problem.sequences.packed() && problem.sequences.max_len_q <= kFewQueries &&
         problem.group_size() * problem.sequences.max_len_q <= kFewRows &&
         problem.key.stride[3] == 1 && problem.value.stride[3] == 1 && !outputs.lse_low;
}

void flash_forward_few_rows(const AttentionProblem& problem, const ForwardOutputs& outputs) {
  with_element(problem.dtype,
               [&](auto element) { FewRowsKernel<decltype(element)>(problem, outputs).run(); });
}

}  // namespace flashattn::cpu
