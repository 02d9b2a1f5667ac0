// Flash attention forward on the CPU (Dao et al., arXiv:2205.14135; Rabe and Staats,
// arXiv:2112.05682): keys and values stream by in tiles, each row keeps a running maximum, a
// running sum and an unnormalised output.
//
// A task owns a chunk of query rows of a few heads that share keys. It packs each tile of keys and
// values once and takes its rows through it in blocks whose scores stay in the nearest cache:
//
//   for each key tile:  pack keys, values
//     for each head, for each block of rows:  scores -> softmax step -> out += weights * values
//
// What a row computes depends on neither chunk nor block, so both may follow the number of threads.
#include <algorithm>
#include <cmath>

#include "core/online_softmax.h"
#include "core/tile_schedule.h"
#include "cpu/attention.h"
#include "cpu/flash_few_rows.h"
#include "cpu/microkernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

// A block's scores stay in the L1 or L2 cache; its rows fill the register blocks of products (6
// rows of vectors, 32 of tiles).
template <class Operand>
struct ForwardTile {
  static constexpr int64_t kRows = sizeof(Operand) == 2 ? 32 : 24;
  static constexpr int64_t kDiagonalRows = sizeof(Operand) == 2 ? 32 : 12;
  static constexpr int64_t kKeys = sizeof(Operand) == 2 ? 512 : 256;
};

struct ForwardPlan {
  int64_t heads_per_task;  // heads of one kv group that a task handles together
  int64_t chunk;           // rows of each head
  TaskGrid grid;           // head = kv_head * blocks of the group; part = chunk

  static constexpr int64_t kMostHeads = 4;
  static constexpr int64_t kMostRows = 1024, kFewestRows = 64;  // rows of a task
  static constexpr int64_t kTasksPerThread = 4;

  explicit ForwardPlan(const AttentionProblem& p) {
    heads_per_task = std::clamp<int64_t>(p.group_size(), 1, kMostHeads);  // a group may be empty
    const int64_t heads = p.heads_kv * divide_up(p.group_size(), heads_per_task);
    const int64_t longest = std::max<int64_t>(p.sequences.max_len_q, 1);
    const int64_t whole = std::max<int64_t>(p.sequences.count * heads, 1);
    const int64_t wanted = divide_up(kTasksPerThread * max_threads(), whole);
    const int64_t parts = std::max(divide_up(longest * heads_per_task, kMostRows),
                                   std::min(wanted, divide_up(longest, kFewestRows)));
    chunk = padded_columns(divide_up(longest, parts));
    grid = {p.sequences.count, heads, divide_up(longest, chunk)};
  }
};

template <class Element, class Operand>
class ForwardKernel {
  using Real = Accumulator<Element>;
  using Kernels = Microkernels<Element, Operand>;
  using Tile = ForwardTile<Operand>;
  static constexpr int64_t kRows = Tile::kRows, kDiagonalRows = Tile::kDiagonalRows;
  static constexpr int64_t kKeys = Tile::kKeys;

 public:
  ForwardKernel(const AttentionProblem& problem, const ForwardOutputs& outputs)
      : p_(problem),
        outputs_(outputs),
        plan_(problem),
        kernels_(microkernels<Element, Operand>()),
        query_stride_(padded_depth<Operand>(p_.head_dim)),
        value_stride_(spread_stride(p_.head_dim_v)),
        out_stride_(padded_columns(p_.head_dim_v)) {
    if (outputs_.max_logits) {
      partial_max_ = Buffer<Real>(p_.sequences.count * p_.heads_q * plan_.grid.parts);
      std::fill_n(partial_max_.data(), p_.sequences.count * p_.heads_q * plan_.grid.parts,
                  kNegativeInfinity<Real>);
    }
  }

  void run() {
    parallel_for_each(
        plan_.grid.count(), [&] { return Scratch(*this); },
        [&](int64_t index, Scratch& scratch) { run_task(plan_.grid[index], scratch); });
    if (outputs_.max_logits) reduce_max_logits();
  }

 private:
  static constexpr bool kRoundsWeights = !std::is_same_v<Operand, Real>;
  static constexpr int64_t kScoreStride = spread_stride(kKeys);
  static constexpr int64_t kWeightStride = padded_depth<Operand>(kScoreStride);

  struct Scratch {
    MicrokernelUse<Element, Operand> use;
    // What products read: packed into the buffers below, or in place.
    const Operand* query_of[ForwardPlan::kMostHeads];  // (chunk, head_dim), left
    const Operand* value;                              // (kKeys, head_dim_v), right

    Buffer<Operand> query;   // (heads, chunk, head_dim), left
    Buffer<Operand> keys;    // (head_dim, kKeys), right
    Buffer<Operand> values;  // (kKeys, head_dim_v), right
    Buffer<Real> scores;     // (kRows, kKeys)
    // (kRows, kKeys), left: unused where they replace the scores; what rounding loses of them is
    // wanted where that of `out` is.
    Buffer<Operand> weights, weights_low;
    Buffer<Real> factors;                // (kRows, kKeys), with dropout only
    Buffer<Real> out;                    // (heads, chunk, head_dim_v), unnormalised
    Buffer<OnlineSoftmax<Real>> states;  // (heads, chunk)
    Buffer<Real> max_logits;             // (heads)

    explicit Scratch(const ForwardKernel& k)
        : use(k.kernels_),
          query(k.plan_.heads_per_task * k.plan_.chunk * k.query_stride_),
          keys(padded_depth<Operand>(k.p_.head_dim) * kScoreStride),
          values(kKeys * k.value_stride_),
          scores(kRows * kScoreStride),
          weights(kRoundsWeights ? kRows * kWeightStride : 0),
          weights_low(kRoundsWeights && k.outputs_.out_low ? kRows * kWeightStride : 0),
          factors(k.p_.dropout ? kRows * kScoreStride : 0),
          out(k.plan_.heads_per_task * k.plan_.chunk * k.out_stride_),
          states(k.plan_.heads_per_task * k.plan_.chunk),
          max_logits(k.plan_.heads_per_task) {}
  };

  // Some rows of one head within a task.
  struct Block {
    int64_t batch, head;
    int64_t slot;       // of the head within the task
    Range rows;         // positions in the sequence
    int64_t first_row;  // rows.begin, counted from the chunk's first row
  };

  void run_task(Task task, Scratch& s) const {
    const Sequence sequence = p_.sequences[task.batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    // Late rows see the most keys under a causal mask: they go first.
    const int64_t part = plan_.grid.parts - 1 - task.part;
    const Range rows{part * plan_.chunk, std::min((part + 1) * plan_.chunk, sequence.len_q)};
    if (rows.empty()) return;

    const int64_t blocks = plan_.grid.heads / p_.heads_kv;
    const int64_t kv_head = task.head / blocks;
    const int64_t first = kv_head * p_.group_size() + task.head % blocks * plan_.heads_per_task;
    const int64_t last = std::min(first + plan_.heads_per_task, (kv_head + 1) * p_.group_size());

    for (int64_t head = first; head < last; ++head) {
      begin_head(task, sequence, rows, head, head - first, s);
    }
    const Tiles tiles = aligned_tiles(mask.keys_for(rows), kKeys);
    for (int64_t t = 0; t < tiles.count(); ++t) {
      load_keys(task, sequence, kv_head, tiles[t], s);
      const Range seeing = mask.queries_for(tiles[t]).overlap(rows);
      for (int64_t head = first; head < last; ++head) {
        const ScoreTerms<Real> terms(p_, task.batch, head, mask);
        const Tiles row_blocks{{from_chunk(rows, seeing.begin), seeing.end}, kRows};
        for (int64_t b = 0; b < row_blocks.count(); ++b) {
          // Along the diagonal thin blocks compute less that is hidden.
          const bool whole = mask.all_visible(row_blocks[b], tiles[t]);
          const Tiles pieces{row_blocks[b], whole ? kRows : kDiagonalRows};
          for (int64_t i = 0; i < pieces.count(); ++i) {
            const int64_t first_row = pieces[i].begin - rows.begin;
            attend({task.batch, head, head - first, pieces[i], first_row}, tiles[t], terms, s);
          }
        }
      }
    }
    for (int64_t head = first; head < last; ++head) {
      finish_head(task, sequence, rows, part, head, head - first, s);
    }
  }

  // The last block boundary at or before a row.
  static int64_t from_chunk(Range chunk, int64_t row) {
    return chunk.begin + (row - chunk.begin) / kRows * kRows;
  }

  void begin_head(Task task, const Sequence& sequence, Range rows, int64_t head, int64_t slot,
                  Scratch& s) const {
    s.query_of[slot] =
        left_operand(kernels_,
                     rows_of<const Element>(p_.query, task.batch, head,
                                            rows.moved(sequence.q_begin), p_.head_dim),
                     s.query.data() + slot * plan_.chunk * query_stride_, query_stride_);
    // A sink is one more term of the sum, without a value.
    OnlineSoftmax<Real> empty;
    if (p_.sinks) empty.add(*p_.sinks.as<const Real>().at(0, head));
    if (empty.max == kNegativeInfinity<Real>) empty = {};
    std::fill_n(state_of(s, slot, 0), rows.size(), empty);
    std::fill_n(out_of(s, slot, 0), rows.size() * out_stride_, Real(0));
    s.max_logits[slot] = kNegativeInfinity<Real>;
  }

  void load_keys(Task task, const Sequence& sequence, int64_t kv_head, Range keys,
                 Scratch& s) const {
    const Range rows = keys.moved(sequence.k_begin);
    kernels_.pack_right_transposed(
        rows_of<const Element>(p_.key, task.batch, kv_head, rows, p_.head_dim), s.keys.data(),
        kScoreStride);
    s.value = right_operand(
        kernels_, rows_of<const Element>(p_.value, task.batch, kv_head, rows, p_.head_dim_v),
        s.values.data(), value_stride_);
  }

  // One key tile for one block of rows, without the keys at either end that no row of it sees.
  void attend(const Block& block, Range tile, const ScoreTerms<Real>& terms, Scratch& s) const {
    Range keys = terms.mask.keys_for(block.rows).overlap(tile);
    if (keys.empty()) return;
    constexpr int64_t kAlign = kDepthMultiple<Operand>;
    keys.begin = tile.begin + (keys.begin - tile.begin) / kAlign * kAlign;
    const int64_t offset = keys.begin - tile.begin;
    const int64_t rows = block.rows.size();
    Real* scores = s.scores.data();
    Operand* weights = weights_of(s);
    Real* out = out_of(s, block.slot, block.first_row);
    const Real* factors = nullptr;

    kernels_.dot_products({rows, padded_columns(keys.size()), p_.head_dim,
                           s.query_of[block.slot] + block.first_row * query_stride_, query_stride_,
                           s.keys.data() + offset * kPair, kScoreStride, scores, kScoreStride,
                           Store::overwrite});
    if (p_.dropout) {
      const DropoutStream stream = p_.dropout.stream(block.batch, p_.heads_q, block.head);
      kernels_.dropout_tile(stream, block.rows, keys, Real(1), s.factors.data(), kScoreStride);
      factors = s.factors.data();
    }
    const Real max =
        kernels_.softmax_step({&terms, block.rows, keys, scores, kScoreStride, factors,
                               state_of(s, block.slot, block.first_row), out, out_stride_,
                               out_stride_, weights, s.weights_low.data(), kWeightStride});
    s.max_logits[block.slot] = std::max(s.max_logits[block.slot], max);
    for (const Operand* part : {weights, s.weights_low.data()}) {
      if (!part) continue;
      kernels_.multiply({rows, out_stride_, keys.size(), part, kWeightStride,
                         s.value + offset * value_stride_, value_stride_, out, out_stride_,
                         Store::accumulate});
    }
  }

  void finish_head(Task task, const Sequence& sequence, Range rows, int64_t part, int64_t head,
                   int64_t slot, Scratch& s) const {
    const auto lse = outputs_.lse.as<Real>();
    const auto lse_low = outputs_.lse_low.as<Real>();
    const Real keep_scale = p_.dropout ? static_cast<Real>(p_.dropout.keep_scale()) : Real(1);
    for (int64_t r = 0; r < rows.size(); ++r) {
      const OnlineSoftmax<Real>& state = *state_of(s, slot, r);
      const int64_t row = sequence.q_begin + rows.begin + r;
      const Real factor = state.inverse_sum() * keep_scale;
      kernels_.store(
          out_of(s, slot, r), out_stride_, factor,
          rows_of<Element>(outputs_.out, task.batch, head, {row, row + 1}, p_.head_dim_v));
      if (outputs_.out_low) {
        kernels_.store_rounding(
            out_of(s, slot, r), out_stride_, factor,
            rows_of<Element>(outputs_.out_low, task.batch, head, {row, row + 1}, p_.head_dim_v));
      }
      const LogSumExp<Real> row_lse = state.log_sum_exp();
      *lse.at(task.batch, head, row) = row_lse.high;
      if (lse_low) *lse_low.at(task.batch, head, row) = row_lse.low;
      // A maximum passes over NaN; the sum does not.
      if (std::isnan(state.sum)) s.max_logits[slot] = state.sum;
    }
    if (partial_max_) {
      partial_max_[(task.batch * p_.heads_q + head) * plan_.grid.parts + part] = s.max_logits[slot];
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

  static constexpr int64_t kPair = sizeof(Operand) == 2 ? 2 : 1;

  // `row` counts from the chunk's first.
  Real* out_of(Scratch& s, int64_t slot, int64_t row) const {
    return s.out.data() + (slot * plan_.chunk + row) * out_stride_;
  }
  OnlineSoftmax<Real>* state_of(Scratch& s, int64_t slot, int64_t row) const {
    return s.states.data() + slot * plan_.chunk + row;
  }
  Operand* weights_of(Scratch& s) const {
    if constexpr (kRoundsWeights) {
      return s.weights.data();
    } else {
      return s.scores.data();
    }
  }

  const AttentionProblem& p_;
  const ForwardOutputs& outputs_;
  const ForwardPlan plan_;
  const Kernels& kernels_;
  const int64_t query_stride_, value_stride_, out_stride_;
  Buffer<Real> partial_max_;  // (batch, heads_q, parts)
};

}  // namespace

void flash_forward(const AttentionProblem& problem, const ForwardOutputs& outputs) {
  if (is_for_few_rows(problem, outputs)) return flash_forward_few_rows(problem, outputs);
  with_operand(problem.dtype, [&](auto element, auto operand) {
    ForwardKernel<decltype(element), decltype(operand)>(problem, outputs).run();
  });
}

}  // namespace flashattn::cpu
