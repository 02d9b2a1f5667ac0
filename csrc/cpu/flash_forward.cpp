// Flash attention forward on the CPU (Dao et al., arXiv:2205.14135; Rabe and Staats,
// arXiv:2112.05682): keys and values stream by in tiles, each row keeps a running maximum, a
// running sum and an unnormalised output.
#include <algorithm>
#include <cmath>
#include <limits>

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

// Rows of several heads of a group share each packed key tile.
struct ForwardPlan {
  int64_t heads_per_task;  // heads of one kv group that a task handles together
  int64_t query_tile;      // rows of each head
  TaskGrid grid;           // head = kv_head * blocks of the group; part = query tile

  static constexpr int64_t kKeyTile = 128;      // scores of one head's tile stay in the L2 cache
  static constexpr int64_t kRowsPerTask = 256;  // enough to pay for packing a key tile
  static constexpr int64_t kWantedTasks = 32;

  explicit ForwardPlan(const AttentionProblem& p) {
    heads_per_task = std::clamp<int64_t>(p.group_size(), 1, 4);  // a group may be empty
    const int64_t blocks = divide_up(p.group_size(), heads_per_task);
    const int64_t heads = p.heads_kv * blocks;
    query_tile = kRowsPerTask / heads_per_task / 16 * 16;
    const int64_t longest = std::max<int64_t>(p.sequences.max_len_q, 1);
    while (query_tile > 32 &&
           p.sequences.count * heads * divide_up(longest, query_tile) < kWantedTasks) {
      query_tile /= 2;
    }
    grid = {p.sequences.count, heads, divide_up(longest, query_tile)};
  }
};

template <class Real>
struct ForwardScratch {
  Buffer<Real> query;                  // (heads, query_tile, padded head_dim)
  Buffer<Real> keys_t;                 // (head_dim, kKeyTile)
  Buffer<Real> values;                 // (kKeyTile, padded head_dim_v)
  Buffer<Real> scores;                 // (query_tile, kKeyTile)
  Buffer<Real> factors;                // (kKeyTile)
  Buffer<Real> out;                    // (heads, query_tile, padded head_dim_v), unnormalised
  Buffer<OnlineSoftmax<Real>> states;  // (heads, query_tile)
  Buffer<Real> max_logits;             // (heads)

  ForwardScratch(const AttentionProblem& p, const ForwardPlan& plan)
      : query(plan.heads_per_task * plan.query_tile * padded_columns(p.head_dim)),
        keys_t(std::max<int64_t>(p.head_dim, 1) * ForwardPlan::kKeyTile),
        values(ForwardPlan::kKeyTile * padded_columns(p.head_dim_v)),
        scores(plan.query_tile * ForwardPlan::kKeyTile),
        factors(ForwardPlan::kKeyTile),
        out(plan.heads_per_task * plan.query_tile * padded_columns(p.head_dim_v)),
        states(plan.heads_per_task * plan.query_tile),
        max_logits(plan.heads_per_task) {}
};

template <class Element>
class ForwardKernel {
  using Real = Accumulator<Element>;
  using Scratch = ForwardScratch<Real>;

 public:
  ForwardKernel(const AttentionProblem& problem, const ForwardOutputs& outputs)
      : p_(problem), outputs_(outputs), plan_(problem), kernels_(microkernels<Real>()) {
    if (outputs_.max_logits) {
      partial_max_ = Buffer<Real>(p_.sequences.count * p_.heads_q * plan_.grid.parts);
      std::fill_n(partial_max_.data(), p_.sequences.count * p_.heads_q * plan_.grid.parts,
                  kNegativeInfinity<Real>);
    }
  }

  void run() {
    parallel_for_each(
        plan_.grid.count(), [&] { return Scratch(p_, plan_); },
        [&](int64_t index, Scratch& scratch) { run_task(plan_.grid[index], scratch); });
    if (outputs_.max_logits) reduce_max_logits();
  }

 private:
  void run_task(Task task, Scratch& s) const {
    const Sequence sequence = p_.sequences[task.batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    // Late rows see the most keys under a causal mask: they go first.
    const int64_t part = plan_.grid.parts - 1 - task.part;
    const Range rows{part * plan_.query_tile,
                     std::min((part + 1) * plan_.query_tile, sequence.len_q)};
    if (rows.empty()) return;

    const int64_t blocks = plan_.grid.heads / p_.heads_kv;
    const int64_t kv_head = task.head / blocks;
    const int64_t first = kv_head * p_.group_size() + task.head % blocks * plan_.heads_per_task;
    const int64_t last = std::min(first + plan_.heads_per_task, (kv_head + 1) * p_.group_size());

    for (int64_t head = first; head < last; ++head)
      begin_head(task, sequence, rows, head, first, s);
    const Tiles tiles = aligned_tiles(mask.keys_for(rows), ForwardPlan::kKeyTile);
    for (int64_t t = 0; t < tiles.count(); ++t) {
      load_keys(task, sequence, kv_head, tiles[t], s);
      for (int64_t head = first; head < last; ++head) {
        const ScoreTerms<Real> terms(p_, task.batch, head, mask);
        attend(task, rows, tiles[t], terms, head, first, s);
      }
    }
    for (int64_t head = first; head < last; ++head) {
      finish_head(task, sequence, rows, part, head, first, s);
    }
  }

  void begin_head(Task task, const Sequence& sequence, Range rows, int64_t head, int64_t first,
                  Scratch& s) const {
    const auto query = p_.query.as<const Element>();
    const StridedMatrix<const Element> from{
        query.at(task.batch, head, sequence.q_begin + rows.begin), query.stride[2], query.stride[3],
        rows.size(), p_.head_dim};
    pack(from, query_of(s, head - first));

    // A sink is one more term of the sum, without a value.
    OnlineSoftmax<Real> empty;
    if (p_.sinks) empty.add(*p_.sinks.as<const Real>().at(0, head));
    if (empty.max == kNegativeInfinity<Real>) empty = {};
    std::fill_n(states_of(s, head - first), rows.size(), empty);
    std::fill_n(out_of(s, head - first), rows.size() * padded_columns(p_.head_dim_v), Real(0));
    s.max_logits[head - first] = kNegativeInfinity<Real>;
  }

  void load_keys(Task task, const Sequence& sequence, int64_t kv_head, Range keys,
                 Scratch& s) const {
    const auto key = p_.key.as<const Element>();
    const auto value = p_.value.as<const Element>();
    const int64_t row = sequence.k_begin + keys.begin;
    pack_transposed<Real, Element>(
        {key.at(task.batch, kv_head, row), key.stride[2], key.stride[3], keys.size(), p_.head_dim},
        s.keys_t.data());
    pack<Real, Element>({value.at(task.batch, kv_head, row), value.stride[2], value.stride[3],
                         keys.size(), p_.head_dim_v},
                        s.values.data());
  }

  // One key tile for the rows of one head: scores, softmax step, dropout, output.
  void attend(Task task, Range rows, Range keys, const ScoreTerms<Real>& terms, int64_t head,
              int64_t first, Scratch& s) const {
    const int64_t stride = padded_columns(keys.size());
    const int64_t query_stride = padded_columns(p_.head_dim);
    const int64_t out_stride = padded_columns(p_.head_dim_v);
    Real* scores = s.scores.data();
    Real* out = out_of(s, head - first);
    OnlineSoftmax<Real>* states = states_of(s, head - first);

    kernels_.multiply({rows.size(), stride, p_.head_dim, query_of(s, head - first), query_stride, 1,
                       s.keys_t.data(), stride, scores, stride, Store::overwrite});
    terms.apply(rows, keys, scores, stride);

    for (int64_t r = 0; r < rows.size(); ++r) {
      Real* row = scores + r * stride;
      const Real max = kernels_.row_max(row, keys.size());
      s.max_logits[head - first] = std::max(s.max_logits[head - first], max);
      const Real factor = states[r].raise_max(max);
      if (factor != Real(1)) kernels_.scale_row(out + r * out_stride, out_stride, factor);
      states[r].sum += kernels_.exp_row(
          row, keys.size(), OnlineSoftmax<Real>::finite_or_zero(states[r].max), Real(0));
    }
    if (p_.dropout) {
      const DropoutStream stream = p_.dropout.stream(task.batch, p_.heads_q, head);
      for (int64_t r = 0; r < rows.size(); ++r) {
        dropout_factors(stream, rows.begin + r, keys, Real(1), s.factors.data());
        for (int64_t c = 0; c < keys.size(); ++c) scores[r * stride + c] *= s.factors[c];
      }
    }
    kernels_.multiply({rows.size(), out_stride, keys.size(), scores, stride, 1, s.values.data(),
                       out_stride, out, out_stride, Store::accumulate});
  }

  void finish_head(Task task, const Sequence& sequence, Range rows, int64_t part, int64_t head,
                   int64_t first, Scratch& s) const {
    const auto out = outputs_.out.as<Element>();
    const auto lse = outputs_.lse.as<Real>();
    const auto out_low = outputs_.out_low.as<Element>();
    const auto lse_low = outputs_.lse_low.as<Real>();
    const int64_t out_stride = padded_columns(p_.head_dim_v);
    const Real keep_scale = p_.dropout ? static_cast<Real>(p_.dropout.keep_scale()) : Real(1);
    for (int64_t r = 0; r < rows.size(); ++r) {
      const OnlineSoftmax<Real>& state = states_of(s, head - first)[r];
      const int64_t row = sequence.q_begin + rows.begin + r;
      const Real* sums = out_of(s, head - first) + r * out_stride;
      const Real factor = state.inverse_sum() * keep_scale;
      store_row(sums, p_.head_dim_v, factor, out.at(task.batch, head, row), out.stride[3]);
      if (out_low) {
        store_rounding(sums, p_.head_dim_v, factor, out_low.at(task.batch, head, row),
                       out_low.stride[3]);
      }
      const LogSumExp<Real> row_lse = state.log_sum_exp();
      *lse.at(task.batch, head, row) = row_lse.high;
      if (lse_low) *lse_low.at(task.batch, head, row) = row_lse.low;
      // A maximum passes over NaN; the sum does not.
      if (std::isnan(state.sum)) s.max_logits[head - first] = state.sum;
    }
    if (partial_max_) {
      partial_max_[(task.batch * p_.heads_q + head) * plan_.grid.parts + part] =
          s.max_logits[head - first];
    }
  }

  void reduce_max_logits() const {
    const auto max_logits = outputs_.max_logits.as<float>();
    for (int64_t batch = 0; batch < p_.sequences.count; ++batch) {
      for (int64_t head = 0; head < p_.heads_q; ++head) {
        const Real* parts = &partial_max_[(batch * p_.heads_q + head) * plan_.grid.parts];
        Real max = kNegativeInfinity<Real>;
        for (int64_t part = 0; part < plan_.grid.parts; ++part) {
          if (parts[part] > max || std::isnan(parts[part])) max = parts[part];
          if (std::isnan(max)) break;
        }
        *max_logits.at(batch, head) = static_cast<float>(max);
      }
    }
  }

  Real* query_of(Scratch& s, int64_t slot) const {
    return s.query.data() + slot * plan_.query_tile * padded_columns(p_.head_dim);
  }
  Real* out_of(Scratch& s, int64_t slot) const {
    return s.out.data() + slot * plan_.query_tile * padded_columns(p_.head_dim_v);
  }
  OnlineSoftmax<Real>* states_of(Scratch& s, int64_t slot) const {
    return s.states.data() + slot * plan_.query_tile;
  }

  const AttentionProblem& p_;
  const ForwardOutputs& outputs_;
  const ForwardPlan plan_;
  const Microkernels<Real>& kernels_;
  Buffer<Real> partial_max_;  // (batch, heads_q, parts)
};

}  // namespace

void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs) {
  with_element(problem.dtype,
               [&](auto element) { ForwardKernel<decltype(element)>(problem, outputs).run(); });
}

}  // namespace flashattn::cpu
