// Flash attention backward on the CPU: probabilities are recomputed tile by tile.
//
// Four passes, each with a fixed order of additions, so that gradients are bitwise reproducible:
//   1. row terms    delta = sum(grad_out * out) - grad_lse, and the sinks' gradient
//   2. key tiles    grad_key and grad_value are owned by a task; grad_query is added into one
//   partial
//                   sum per split of the keys
//   3. grad_query   the partial sums, in order
//   4. grad_mask    only if asked for: each task owns a tile of the mask's own shape and visits
//   every
//                   pair that was broadcast from it
#include <algorithm>
#include <cmath>

#include "core/tile_schedule.h"
#include "cpu/attention.h"
#include "cpu/gradient_tile.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {
namespace {

template <class Element>
class BackwardKernel {
  using Real = Accumulator<Element>;
  using Tile = GradientTile<Element>;
  static constexpr int64_t kRowBlock = 64;

 public:
  BackwardKernel(const AttentionProblem& problem, const BackwardInputs& inputs,
                 const BackwardOutputs& outputs)
      : p_(problem),
        inputs_(inputs),
        outputs_(outputs),
        kernels_(microkernels<Real>()),
        storage_batch_(p_.sequences.packed() ? 1 : p_.sequences.count),
        query_stride_(padded_columns(p_.head_dim)),
        row_parts_(divide_up(std::max<int64_t>(p_.sequences.max_len_q, 1), kRowBlock)),
        deltas_(storage_batch_ * p_.heads_q * p_.sequences.storage_q) {}

  void run() {
    row_terms();
    if (outputs_.grad_query || outputs_.grad_key || outputs_.grad_value || outputs_.grad_alibi) {
      key_tiles();
    }
    if (outputs_.grad_query) reduce_grad_query();
    if (outputs_.grad_mask) mask_gradient();
  }

 private:
  // --- 1. row terms ---

  void row_terms() {
    const TaskGrid grid{p_.sequences.count, p_.heads_q, row_parts_};
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
    const Range rows = block_of(task.part, sequence.len_q);
    const auto grad_out = inputs_.grad_out.as<const Element>();
    const auto out = inputs_.out.as<const Element>();
    const auto out_low = inputs_.out_low.as<const Element>();
    const auto lse = inputs_.lse.as<const Real>();
    const auto lse_low = inputs_.lse_low.as<const Real>();
    const auto grad_lse = inputs_.grad_lse.as<const Real>();
    Real grad_sink = 0;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const int64_t row = sequence.q_begin + i;
      const Real row_lse = *lse.at(task.batch, task.head, row);
      Real delta = 0;
      if (row_lse != kNegativeInfinity<Real>) {
        const Element* a = grad_out.at(task.batch, task.head, row);
        const Element* b = out.at(task.batch, task.head, row);
        for (int64_t c = 0; c < p_.head_dim_v; ++c) {
          delta += convert<Real>(a[c * grad_out.stride[3]]) * convert<Real>(b[c * out.stride[3]]);
        }
        if (out_low) {
          const Element* low = out_low.at(task.batch, task.head, row);
          for (int64_t c = 0; c < p_.head_dim_v; ++c) {
            delta += convert<Real>(a[c * grad_out.stride[3]]) *
                     convert<Real>(low[c * out_low.stride[3]]);
          }
        }
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

  // --- 2. key tiles ---

  struct Scratch {
    Tile tile;
    Buffer<Real> grad_key;    // (keys, padded head_dim)
    Buffer<Real> grad_value;  // (keys, padded head_dim_v)

    explicit Scratch(const BackwardKernel& kernel)
        : tile(kernel.p_, kernel.inputs_),
          grad_key(GradientTileSize::kKeys * kernel.query_stride_),
          grad_value(GradientTileSize::kKeys * padded_columns(kernel.p_.head_dim_v)) {}
  };

  void key_tiles() {
    const int64_t tiles =
        divide_up(std::max<int64_t>(p_.sequences.max_len_k, 1), GradientTileSize::kKeys);
    splits_ = backward_key_splits(p_.sequences.count * p_.heads_kv, tiles);
    split_size_ = storage_batch_ * p_.heads_q * p_.sequences.storage_q * query_stride_;
    if (outputs_.grad_query) {
      grad_query_ = Buffer<Real>(splits_ * split_size_, Buffer<Real>::Fill::zero);
    }
    if (outputs_.grad_alibi) {
      grad_alibi_ =
          Buffer<Real>(splits_ * p_.sequences.count * p_.heads_q, Buffer<Real>::Fill::zero);
    }
    const TaskGrid grid{p_.sequences.count, p_.heads_kv, splits_};
    parallel_for_each(
        grid.count(), [&] { return Scratch(*this); },
        [&](int64_t index, Scratch& scratch) { run_split(grid[index], scratch); });
    if (outputs_.grad_alibi) reduce_grad_alibi();
  }

  // A split takes every splits-th key tile, which balances a causal mask.
  void run_split(Task task, Scratch& s) {
    const Sequence sequence = p_.sequences[task.batch];
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const Tiles tiles{{0, sequence.len_k}, GradientTileSize::kKeys};
    for (int64_t t = task.part; t < tiles.count(); t += splits_) {
      const Range keys = tiles[t];
      const Range rows = mask.queries_for(keys);
      if (rows.empty()) continue;
      s.tile.load_keys(task.batch, task.head, sequence, keys);
      std::fill_n(s.grad_key.data(), keys.size() * query_stride_, Real(0));
      std::fill_n(s.grad_value.data(), keys.size() * padded_columns(p_.head_dim_v), Real(0));
      const int64_t first = task.head * p_.group_size();
      for (int64_t head = first; head < first + p_.group_size(); ++head) {
        const Tiles row_tiles = aligned_tiles(rows, GradientTileSize::kQueries);
        for (int64_t q = 0; q < row_tiles.count(); ++q) {
          add_tile(task, head, sequence, mask, row_tiles[q], keys, s);
        }
      }
      store_key_gradients(task, sequence, keys, s);
    }
  }

  void add_tile(Task task, int64_t head, const Sequence& sequence, const SequenceMask& mask,
                Range rows, Range keys, Scratch& s) {
    const int64_t row = sequence.q_begin + rows.begin;
    Tile& tile = s.tile;
    tile.load_queries(task.batch, head, sequence, rows);
    tile.compute(task.batch, head, sequence, mask, delta_of(task.batch, head, row));
    const int64_t stride = tile.stride(), value_stride = padded_columns(p_.head_dim_v);
    if (outputs_.grad_value) {
      kernels_.multiply({keys.size(), value_stride, rows.size(), tile.weights(), 1, stride,
                         tile.grad_out(), value_stride, s.grad_value.data(), value_stride,
                         Store::accumulate});
    }
    if (outputs_.grad_key) {
      kernels_.multiply({keys.size(), query_stride_, rows.size(), tile.grad_dots(), 1, stride,
                         tile.queries(), query_stride_, s.grad_key.data(), query_stride_,
                         Store::accumulate});
    }
    if (outputs_.grad_query) {
      kernels_.multiply({rows.size(), query_stride_, keys.size(), tile.grad_dots(), stride, 1,
                         tile.keys(), query_stride_,
                         grad_query_of(task.part, task.batch, head, row), query_stride_,
                         Store::accumulate});
    }
    if (outputs_.grad_alibi) {
      Real sum = 0;
      for (int64_t r = 0; r < rows.size(); ++r) {
        const Real* grads = tile.grad_scores() + r * stride;
        for (int64_t c = 0; c < keys.size(); ++c) {
          const Real distance = alibi_distance<Real>(rows.begin + r, mask.shift, keys.begin + c);
          sum += grads[c] * distance;
        }
      }
      grad_alibi_[(task.part * p_.sequences.count + task.batch) * p_.heads_q + head] += sum;
    }
  }

  void store_key_gradients(Task task, const Sequence& sequence, Range keys, Scratch& s) {
    const int64_t row = sequence.k_begin + keys.begin;
    if (outputs_.grad_key) {
      store_rows(outputs_.grad_key, task.batch, task.head, row, keys.size(), p_.head_dim,
                 s.grad_key.data());
    }
    if (outputs_.grad_value) {
      store_rows(outputs_.grad_value, task.batch, task.head, row, keys.size(), p_.head_dim_v,
                 s.grad_value.data());
    }
  }

  static void store_rows(const UntypedView4& view, int64_t batch, int64_t head, int64_t first_row,
                         int64_t rows, int64_t columns, const Real* packed) {
    const auto to = view.as<Element>();
    for (int64_t r = 0; r < rows; ++r) {
      store_row(packed + r * padded_columns(columns), columns, Real(1),
                to.at(batch, head, first_row + r), to.stride[3]);
    }
  }

  void reduce_grad_alibi() {
    const auto grad_alibi = outputs_.grad_alibi.as<Real>();
    for (int64_t split = 0; split < splits_; ++split) {
      for (int64_t batch = 0; batch < p_.sequences.count; ++batch) {
        for (int64_t head = 0; head < p_.heads_q; ++head) {
          *grad_alibi.at(batch, head) +=
              grad_alibi_[(split * p_.sequences.count + batch) * p_.heads_q + head];
        }
      }
    }
  }

  // --- 3. grad_query ---

  void reduce_grad_query() {
    const TaskGrid grid{p_.sequences.count, p_.heads_q, row_parts_};
    parallel_for_each(grid.count(), [&](int64_t index) {
      const Task task = grid[index];
      const Sequence sequence = p_.sequences[task.batch];
      const Range rows = block_of(task.part, sequence.len_q);
      if (rows.empty()) return;
      const int64_t row = sequence.q_begin + rows.begin;
      Real* sum = grad_query_of(0, task.batch, task.head, row);
      for (int64_t split = 1; split < splits_; ++split) {
        const Real* part = grad_query_of(split, task.batch, task.head, row);
        for (int64_t i = 0; i < rows.size() * query_stride_; ++i) sum[i] += part[i];
      }
      store_rows(outputs_.grad_query, task.batch, task.head, row, rows.size(), p_.head_dim, sum);
    });
  }

  // --- 4. grad_mask ---

  struct MaskScratch {
    Tile tile;
    Buffer<Real> sum;  // (queries | 1, keys | 1)

    explicit MaskScratch(const BackwardKernel& kernel)
        : tile(kernel.p_, kernel.inputs_),
          sum(GradientTileSize::kQueries * GradientTileSize::kKeys) {}
  };

  // Where dimension d of the mask was broadcast, a task covers all of it; else one index or tile.
  Range covered(int dimension, int64_t index, int64_t length, int64_t tile) const {
    const int64_t size = outputs_.grad_mask.size[dimension];
    if (size == 1) return {0, length};
    return {index * tile, std::min((index + 1) * tile, length)};
  }

  void mask_gradient() {
    const int64_t* size = outputs_.grad_mask.size;
    const int64_t row_tiles = divide_up(size[2], GradientTileSize::kQueries);
    const int64_t key_tiles = divide_up(size[3], GradientTileSize::kKeys);
    const TaskGrid grid{size[0], size[1], row_tiles * key_tiles};
    parallel_for_each(
        grid.count(), [&] { return MaskScratch(*this); },
        [&](int64_t index, MaskScratch& s) {
          const Task task = grid[index];
          const Range rows =
              covered(2, task.part / key_tiles, p_.sequences.storage_q, GradientTileSize::kQueries);
          const Range keys =
              covered(3, task.part % key_tiles, p_.sequences.storage_k, GradientTileSize::kKeys);
          run_mask_tile(task, rows, keys, s);
        });
  }

  void run_mask_tile(Task task, Range rows, Range keys, MaskScratch& s) {
    const auto grad_mask = outputs_.grad_mask.as<Real>();
    const int64_t sum_rows = grad_mask.size[2] == 1 ? 1 : rows.size();
    const int64_t sum_keys = grad_mask.size[3] == 1 ? 1 : keys.size();
    std::fill_n(s.sum.data(), sum_rows * sum_keys, Real(0));
    const Range batches = covered(0, task.batch, p_.sequences.count, 1);
    const Range heads = covered(1, task.head, p_.heads_q, 1);
    for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
      const Sequence sequence = p_.sequences[batch];
      const Range seen_keys{keys.begin, std::min(keys.end, sequence.len_k)};
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        add_mask_tiles(batch, head, sequence, rows, seen_keys, sum_rows, sum_keys, s);
      }
    }
    for (int64_t r = 0; r < sum_rows; ++r) {
      for (int64_t c = 0; c < sum_keys; ++c) {
        *grad_mask.at(task.batch, task.head, grad_mask.size[2] == 1 ? 0 : rows.begin + r,
                      grad_mask.size[3] == 1 ? 0 : keys.begin + c) = s.sum[r * sum_keys + c];
      }
    }
  }

  void add_mask_tiles(int64_t batch, int64_t head, const Sequence& sequence, Range rows, Range keys,
                      int64_t sum_rows, int64_t sum_keys, MaskScratch& s) {
    const SequenceMask mask = p_.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
    const Tiles key_tiles = aligned_tiles(keys, GradientTileSize::kKeys);
    for (int64_t k = 0; k < key_tiles.count(); ++k) {
      const Range key_tile = key_tiles[k];
      const Range seen = mask.queries_for(key_tile);
      const Range seen_rows{std::max(rows.begin, seen.begin), std::min(rows.end, seen.end)};
      if (seen_rows.empty()) continue;
      s.tile.load_keys(batch, p_.kv_head(head), sequence, key_tile);
      const Tiles row_tiles = aligned_tiles(seen_rows, GradientTileSize::kQueries);
      for (int64_t q = 0; q < row_tiles.count(); ++q) {
        const Range row_tile = row_tiles[q];
        s.tile.load_queries(batch, head, sequence, row_tile);
        s.tile.compute(batch, head, sequence, mask, delta_of(batch, head, row_tile.begin));
        for (int64_t r = 0; r < row_tile.size(); ++r) {
          const Real* grads = s.tile.grad_scores() + r * s.tile.stride();
          Real* sum =
              s.sum.data() + (sum_rows == 1 ? 0 : row_tile.begin - rows.begin + r) * sum_keys;
          for (int64_t c = 0; c < key_tile.size(); ++c) {
            sum[sum_keys == 1 ? 0 : key_tile.begin - keys.begin + c] += grads[c];
          }
        }
      }
    }
  }

  // --- shared ---

  static Range block_of(int64_t part, int64_t length) {
    return {part * kRowBlock, std::min((part + 1) * kRowBlock, length)};
  }
  // Row of the (batch, heads_q, storage_q) arrays; packed sequences share one batch entry.
  int64_t row_index(int64_t batch, int64_t head, int64_t row) const {
    const int64_t entry = p_.sequences.packed() ? 0 : batch;
    return (entry * p_.heads_q + head) * p_.sequences.storage_q + row;
  }
  Real* delta_of(int64_t batch, int64_t head, int64_t row) const {
    return deltas_.data() + row_index(batch, head, row);
  }
  Real* grad_query_of(int64_t split, int64_t batch, int64_t head, int64_t row) const {
    return grad_query_.data() + split * split_size_ + row_index(batch, head, row) * query_stride_;
  }

  const AttentionProblem& p_;
  const BackwardInputs& inputs_;
  const BackwardOutputs& outputs_;
  const Microkernels<Real>& kernels_;
  const int64_t storage_batch_, query_stride_, row_parts_;
  int64_t splits_ = 1, split_size_ = 0;
  Buffer<Real> deltas_;      // (storage batch, heads_q, storage_q)
  Buffer<Real> grad_query_;  // (splits, storage batch, heads_q, storage_q, padded head_dim)
  Buffer<Real> grad_alibi_;  // (splits, batch, heads_q)
};

}  // namespace

void flash_backward(const AttentionProblem& problem, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs) {
  with_element(problem.dtype, [&](auto element) {
    BackwardKernel<decltype(element)>(problem, inputs, outputs).run();
  });
}

}  // namespace flashattn::cpu
