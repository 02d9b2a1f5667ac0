// Flash attention backward on the CPU: probabilities are recomputed tile by tile.
//
// Two passes, each with a fixed order of additions, so that gradients are bitwise reproducible:
//   1. row terms   delta = sum(grad_out * out) - grad_lse, and the sinks' gradient
//   2. key blocks  a task owns grad_key and grad_value of a block of keys and takes all queries
//                  that see it through it. grad_query gets its parts in the order of the keys
//                  (Turns): task after task adds to the same sum, and the last one stores it.
//                  grad_mask gets its parts in the order of the tasks (MaskGradient)
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "core/tile_schedule.h"
#include "cpu/attention.h"
#include "cpu/gradient_tile.h"
#include "cpu/mask_gradient.h"
#include "cpu/parallel.h"
#include "cpu/turns.h"

namespace flashattn::cpu {
namespace {

template <class Element, class Operand>
class BackwardKernel {
  using Real = Accumulator<Element>;
  using Tile = GradientTile<Element, Operand>;
  using Size = GradientTileSize;
  using MaskTask = typename MaskGradient<Real>::Task;
  static constexpr int64_t kRowBlock = 64;  // rows of a task of the first pass

 public:
  BackwardKernel(const AttentionProblem& problem, const BackwardInputs& inputs,
                 const BackwardOutputs& outputs)
      : p_(problem),
        inputs_(inputs),
        outputs_(outputs),
        kernels_(microkernels<Element, Operand>()),
        storage_batch_(p_.sequences.packed() ? 1 : p_.sequences.count),
        query_stride_(padded_columns(p_.head_dim)),
        deltas_(storage_batch_ * p_.heads_q * p_.sequences.storage_q) {}

  void run() {
    row_terms();
    if (outputs_.grad_query || outputs_.grad_key || outputs_.grad_value || outputs_.grad_mask ||
        outputs_.grad_alibi) {
      key_blocks();
    }
  }

 private:
  // --- 1. row terms ---

  void row_terms() {
    const int64_t parts = divide_up(std::max<int64_t>(p_.sequences.max_len_q, 1), kRowBlock);
    const TaskGrid grid{p_.sequences.count, p_.heads_q, parts};
    Buffer<Real> partial_sinks;
    if (outputs_.grad_sinks) {
      partial_sinks = Buffer<Real>(grid.count(), Buffer<Real>::Fill::zero);
    }
    parallel_for_each(grid.count(), [&](int64_t index) {
      const Real sink = row_terms_of(grid[index]);
      if (partial_sinks) partial_sinks[index] = sink;
    });
    if (!partial_sinks) return;
    const auto grad_sinks = outputs_.grad_sinks.as<Real>();
    for (int64_t index = 0; index < grid.count(); ++index) {
      *grad_sinks.at(0, grid[index].head) += partial_sinks[index];
    }
  }

  // Returns this block's part of the sink's gradient.
  Real row_terms_of(Task task) {
    const Sequence sequence = p_.sequences[task.batch];
    const Range rows{task.part * kRowBlock, std::min((task.part + 1) * kRowBlock, sequence.len_q)};
    const Range stored = rows.moved(sequence.q_begin);
    const auto matrix = [&](const UntypedView4& view) {
      return rows_of<const Element>(view, task.batch, task.head, stored, p_.head_dim_v);
    };
    Real dots[kRowBlock], low_dots[kRowBlock] = {};
    kernels_.row_dots(matrix(inputs_.grad_out), matrix(inputs_.out), dots);
    if (inputs_.out_low) {
      kernels_.row_dots(matrix(inputs_.grad_out), matrix(inputs_.out_low), low_dots);
    }
    const auto lse = inputs_.lse.as<const Real>();
    const auto lse_low = inputs_.lse_low.as<const Real>();
    const auto grad_lse = inputs_.grad_lse.as<const Real>();
    Real grad_sink = 0;
    for (int64_t r = 0; r < rows.size(); ++r) {
      const int64_t row = stored.begin + r;
      const Real row_lse = *lse.at(task.batch, task.head, row);
      Real delta = 0;
      if (row_lse != kNegativeInfinity<Real>) {
        delta = dots[r] + low_dots[r];
        if (grad_lse) delta -= *grad_lse.at(task.batch, task.head, row);
        if (outputs_.grad_sinks) {
          const Real low = lse_low ? *lse_low.at(task.batch, task.head, row) : Real(0);
          const Real sink = *p_.sinks.as<const Real>().at(0, task.head);
          grad_sink -= probability(sink, LogSumExp<Real>{row_lse, low}) * delta;
        }
      }
      *delta_of(task.batch, task.head, row) = delta;
    }
    return grad_sink;
  }

  // --- 2. key blocks ---

  struct Scratch {
    Tile tile;
    Buffer<Real> grad_key_t;    // (padded head_dim, block's keys)
    Buffer<Real> grad_value_t;  // (padded head_dim_v, block's keys)
    Buffer<Real> grad_mask;     // see MaskGradient

    explicit Scratch(const BackwardKernel& k)
        : tile(k.p_, k.inputs_, k.block_),
          grad_key_t(padded_columns(k.p_.head_dim) * tile.keys_stride()),
          grad_value_t(padded_columns(k.p_.head_dim_v) * tile.keys_stride()),
          grad_mask(k.mask_gradient_ ? k.mask_gradient_->local_size() : 0) {}
  };

  // Results depend on neither the block's size nor the number of threads: every sum is made tile by
  // tile in the same order.
  void key_blocks() {
    constexpr int64_t kTasksPerThread = 4;
    const int64_t heads = p_.sequences.count * p_.heads_kv;
    const int64_t longest = std::max<int64_t>(p_.sequences.max_len_k, 1);
    block_ = Size::kMostKeys;
    // But for a mask's gradient that is summed over keys, block by block.
    const bool any_block = !outputs_.grad_mask || outputs_.grad_mask.size[3] > 1;
    while (any_block && block_ > Size::kKeys &&
           heads * divide_up(longest, block_) < kTasksPerThread * max_threads()) {
      block_ /= 2;
    }
    query_tiles_ = divide_up(std::max<int64_t>(p_.sequences.max_len_q, 1), Size::kQueries);
    if (outputs_.grad_query) {
      grad_query_ =
          Buffer<Real>(storage_batch_ * p_.heads_q * p_.sequences.storage_q * query_stride_);
    }
    const int64_t key_tiles = divide_up(longest, Size::kKeys);
    if (outputs_.grad_alibi) {
      grad_alibi_ =
          Buffer<Real>(key_tiles * p_.sequences.count * p_.heads_q, Buffer<Real>::Fill::zero);
    }
    // Blocks vary slowest: tasks that add to the same grad_query shall be far apart.
    const TaskGrid grid{divide_up(longest, block_), p_.sequences.count, p_.heads_kv};
    const int64_t query_turns =
        outputs_.grad_query ? p_.sequences.count * p_.heads_q * query_tiles_ : 0;
    Turns turns(query_turns +
                MaskGradient<Real>::turns_of(outputs_.grad_mask, query_tiles_, grid.batch));
    if (outputs_.grad_mask) {
      mask_gradient_.emplace(p_, outputs_.grad_mask, query_tiles_, block_, turns, query_turns);
    }
    parallel_for_each(
        grid.count(), [&] { return turns.guard([&] { return std::make_unique<Scratch>(*this); }); },
        [&](int64_t index, std::unique_ptr<Scratch>& scratch) {
          const Task task = grid[index];
          turns.guard([&] { run_block(task.batch, task.head, task.part, turns, *scratch); });
        });
    if (outputs_.grad_alibi) reduce_grad_alibi(key_tiles);
  }

  void run_block(int64_t block, int64_t batch, int64_t kv_head, Turns& turns, Scratch& s) {
    const Sequence sequence = p_.sequences[batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const Range keys{block * block_, std::min((block + 1) * block_, sequence.len_k)};
    const bool seen = !keys.empty() && !mask.queries_for(keys).empty();
    if (seen) {
      s.tile.load_keys(batch, kv_head, sequence, keys);
      std::fill_n(s.grad_key_t.data(), padded_columns(p_.head_dim) * s.tile.keys_stride(), Real(0));
      std::fill_n(s.grad_value_t.data(), padded_columns(p_.head_dim_v) * s.tile.keys_stride(),
                  Real(0));
    }
    const MaskTask mask_task{batch, kv_head, block, keys, s.grad_mask.data()};
    if (mask_gradient_) mask_gradient_->begin(mask_task);
    const Tiles row_tiles{{0, sequence.len_q}, Size::kQueries};
    for (int64_t q = 0; q < row_tiles.count(); ++q) {
      if (mask_gradient_) mask_gradient_->begin_queries(mask_task, q);
      const Range rows = row_tiles[q], seen_keys = mask.keys_for(rows);
      if (seen && !seen_keys.overlap(keys).empty()) {
        const BlockOrder order{seen_keys.begin / block_, block, (seen_keys.end - 1) / block_};
        for (int64_t slot = 0; slot < p_.group_size(); ++slot) {
          const int64_t head = kv_head * p_.group_size() + slot;
          const ScoreTerms<Real> terms(p_, batch, head, mask);
          const int64_t sum = (batch * p_.heads_q + head) * query_tiles_ + q;
          add_queries(batch, head, sequence, terms, rows, keys, order, sum, turns, mask_task, s);
        }
      }
      if (mask_gradient_) mask_gradient_->end_queries(mask_task, q);
    }
    if (mask_gradient_) mask_gradient_->end(mask_task);
    if (!seen) return;
    const Real scale = static_cast<Real>(p_.scale);
    const Range stored = keys.moved(sequence.k_begin);
    if (outputs_.grad_key) {
      kernels_.store_transposed(
          s.grad_key_t.data(), s.tile.keys_stride(), scale,
          rows_of<Element>(outputs_.grad_key, batch, kv_head, stored, p_.head_dim));
    }
    if (outputs_.grad_value) {
      kernels_.store_transposed(
          s.grad_value_t.data(), s.tile.keys_stride(), Real(1),
          rows_of<Element>(outputs_.grad_value, batch, kv_head, stored, p_.head_dim_v));
    }
  }

  // The blocks of keys that a tile of queries sees: the first, this one and the last.
  struct BlockOrder {
    int64_t first, current, last;
  };

  // One tile of queries against a block of keys.
  void add_queries(int64_t batch, int64_t head, const Sequence& sequence,
                   const ScoreTerms<Real>& terms, Range rows, Range keys, BlockOrder order,
                   int64_t sum, Turns& turns, const MaskTask& mask_task, Scratch& s) {
    const int64_t row = sequence.q_begin + rows.begin;  // in the storage
    Real* grad_query = grad_query_ ? grad_query_of(batch, head, row) : nullptr;
    s.tile.load_queries(batch, head, sequence, rows, delta_of(batch, head, row));
    if (grad_query) {
      turns.wait(sum, order.current - order.first);
      if (order.current == order.first) {
        std::fill_n(grad_query, rows.size() * query_stride_, Real(0));
      }
    }
    const Tiles tiles{keys, Size::kKeys};
    for (int64_t t = 0; t < tiles.count(); ++t) {
      // Along the diagonal thin tiles compute less that is hidden.
      const bool whole = terms.mask.all_visible(rows, tiles[t]);
      const Tiles pieces{rows, whole ? Size::kQueries : Size::kDiagonalQueries};
      for (int64_t i = 0; i < pieces.count(); ++i) {
        const Range seen = from_multiple(tiles[t], terms.mask.keys_for(pieces[i]));
        if (seen.empty()) continue;
        s.tile.compute(batch, head, terms, pieces[i], seen);
        if (outputs_.grad_value) s.tile.add_grad_value(s.grad_value_t.data());
        if (outputs_.grad_key) s.tile.add_grad_key(s.grad_key_t.data());
        if (grad_query) s.tile.add_grad_query(grad_query, query_stride_);
        if (outputs_.grad_alibi) {
          const int64_t key_tile = keys.begin / Size::kKeys + t;
          grad_alibi_[(key_tile * p_.sequences.count + batch) * p_.heads_q + head] +=
              alibi_gradient(s.tile, terms.mask.shift);
        }
        if (mask_gradient_) {
          mask_gradient_->add(mask_task, head, s.tile.rows(), s.tile.keys(), s.tile.grad_scores(),
                              Tile::kStride);
        }
      }
    }
    if (!grad_query) return;
    if (order.current == order.last) {
      kernels_.store(grad_query, query_stride_, static_cast<Real>(p_.scale),
                     rows_of<Element>(outputs_.grad_query, batch, head,
                                      rows.moved(sequence.q_begin), p_.head_dim));
    }
    turns.finish(sum);
  }

  // The part of a tile that `seen` covers, begun at a multiple of 32 from the tile's first.
  static Range from_multiple(Range tile, Range seen) {
    const Range part = tile.overlap(seen);
    return {tile.begin + (part.begin - tile.begin) / 32 * 32, part.end};
  }

  static Real alibi_gradient(const Tile& tile, int64_t shift) {
    Real sum = 0;
    for (int64_t i = tile.rows().begin; i < tile.rows().end; ++i) {
      const Real* grads = tile.grad_scores() + (i - tile.rows().begin) * Tile::kStride;
      for (int64_t c = 0; c < tile.keys().size(); ++c) {
        sum += grads[c] * alibi_distance<Real>(i, shift, tile.keys().begin + c);
      }
    }
    return sum;
  }

  void reduce_grad_alibi(int64_t key_tiles) {
    const auto grad_alibi = outputs_.grad_alibi.as<Real>();
    for (int64_t tile = 0; tile < key_tiles; ++tile) {
      for (int64_t batch = 0; batch < p_.sequences.count; ++batch) {
        for (int64_t head = 0; head < p_.heads_q; ++head) {
          *grad_alibi.at(batch, head) +=
              grad_alibi_[(tile * p_.sequences.count + batch) * p_.heads_q + head];
        }
      }
    }
  }

  // --- shared ---

  // Row of the (batch, heads_q, storage_q) arrays; packed sequences share one batch entry.
  int64_t row_index(int64_t batch, int64_t head, int64_t row) const {
    const int64_t entry = p_.sequences.packed() ? 0 : batch;
    return (entry * p_.heads_q + head) * p_.sequences.storage_q + row;
  }
  Real* delta_of(int64_t batch, int64_t head, int64_t row) const {
    return deltas_.data() + row_index(batch, head, row);
  }
  Real* grad_query_of(int64_t batch, int64_t head, int64_t row) const {
    return grad_query_.data() + row_index(batch, head, row) * query_stride_;
  }

  const AttentionProblem& p_;
  const BackwardInputs& inputs_;
  const BackwardOutputs& outputs_;
  const Microkernels<Element, Operand>& kernels_;
  const int64_t storage_batch_, query_stride_;
  int64_t block_ = 0;        // keys of a task of the second pass
  int64_t query_tiles_ = 0;  // of the longest sequence
  Buffer<Real> deltas_;      // (storage batch, heads_q, storage_q)
  Buffer<Real> grad_query_;  // (storage batch, heads_q, storage_q, padded head_dim), unscaled
  Buffer<Real> grad_alibi_;  // (key tiles, batch, heads_q)
  std::optional<MaskGradient<Real>> mask_gradient_;
};

}  // namespace

void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs) {
  with_operand(problem.dtype, [&](auto element, auto operand) {
    BackwardKernel<decltype(element), decltype(operand)>(problem, inputs, outputs).run();
  });
}

}  // namespace flashattn::cpu
