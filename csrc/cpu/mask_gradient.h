// The gradient of a float mask: a sum over all that the mask was broadcast to, which the key blocks
// of backward add to in their order (Turns).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "core/tile_schedule.h"
#include "cpu/turns.h"

namespace flashattn::cpu {

// Where the mask has a row for each query and a column for each key, a task takes its turn for each
// tile of queries. Else it sums by itself, and takes one turn at its end.
template <class Real>
class MaskGradient {
 public:
  // A block of keys of one kv head: `block` is its number, `local` (local_size) its worker's
  // memory.
  struct Task {
    int64_t batch, kv_head, block;
    Range keys;
    Real* local;
  };

  // turns: those from first_turn on are for this sum.
  MaskGradient(const AttentionProblem& problem, const UntypedView4& grad_mask, int64_t query_tiles,
               int64_t block_keys, Turns& turns, int64_t first_turn)
      : view_(grad_mask),
        batches_(problem.sequences.count),
        heads_kv_(problem.heads_kv),
        group_(problem.group_size()),
        query_tiles_(query_tiles),
        block_keys_(block_keys),
        turns_(turns),
        first_turn_(first_turn) {}

  // How many turns there are for a view of a gradient, at most.
  static int64_t turns_of(const UntypedView4& grad_mask, int64_t query_tiles, int64_t key_blocks) {
    return grad_mask ? grad_mask.size[0] * grad_mask.size[1] * query_tiles * key_blocks : 0;
  }

  int64_t local_size() const { return sums_locally() ? slots() * local_rows() * local_keys() : 0; }

  void begin(const Task& task) const { std::fill_n(task.local, local_size(), Real(0)); }

  // Around the tiles of some queries, in every task, in the order of the queries.
  void begin_queries(const Task& task, int64_t tile) const {
    if (!sums_locally()) turns_.wait(turn_of(task, tile), position_of(task));
  }
  void end_queries(const Task& task, int64_t tile) const {
    if (!sums_locally()) turns_.finish(turn_of(task, tile));
  }

  // grads (rows, keys): the gradient of the scores of a query head.
  void add(const Task& task, int64_t head, Range rows, Range keys, const Real* grads,
           int64_t stride) const {
    const Sum sum = sums_locally() ? local(task, head) : global(task, head);
    for (int64_t i = rows.begin; i < rows.end; ++i, grads += stride) {
      sum.add_row(i, keys, grads);
    }
  }

  void end(const Task& task) const {
    if (!sums_locally()) return;
    turns_.wait(turn_of(task, 0), position_of(task));
    const int64_t keys = shared(3) ? 1 : task.keys.size();
    for (int64_t slot = 0; slot < slots(); ++slot) {
      const int64_t head = task.kv_head * group_ + slot;
      const Sum from = local(task, head), to = global(task, head);
      for (int64_t i = 0; i < local_rows(); ++i) {
        to.add_row(i, {task.keys.begin, task.keys.begin + keys}, from.at(i, task.keys.begin));
      }
    }
    turns_.finish(turn_of(task, 0));
  }

 private:
  // Strides are 0 where the mask was broadcast.
  struct Sum {
    Real* data;
    int64_t row_stride, key_stride;

    Real* at(int64_t row, int64_t key) const { return data + row * row_stride + key * key_stride; }
    void add_row(int64_t row, Range keys, const Real* grads) const {
      constexpr int64_t kLine = 64 / sizeof(Real), kRowsAhead = 4;
      Real* to = at(row, keys.begin);
      const Real* later = to + kRowsAhead * row_stride;
      for (int64_t c = 0; c < keys.size(); c += kLine) __builtin_prefetch(later + c * key_stride);
      for (int64_t c = 0; c < keys.size(); ++c) to[c * key_stride] += grads[c];
    }
  };

  bool sums_locally() const { return shared(2) || shared(3); }
  int64_t slots() const { return shared(1) ? 1 : group_; }
  int64_t local_rows() const { return view_.size[2]; }
  int64_t local_keys() const { return std::min(view_.size[3], block_keys_); }

  Sum global(const Task& task, int64_t head) const {
    return {view_.as<Real>().at(task.batch % view_.size[0], head % view_.size[1]),
            stride(2, view_.stride[2]), stride(3, view_.stride[3])};
  }
  Sum local(const Task& task, int64_t head) const {
    const int64_t slot = head % group_ % slots();
    const int64_t row_stride = stride(2, local_keys()), key_stride = stride(3, 1);
    return {task.local + slot * local_rows() * local_keys() - task.keys.begin * key_stride,
            row_stride, key_stride};
  }
  int64_t stride(int dimension, int64_t value) const { return shared(dimension) ? 0 : value; }

  // The tasks that share a sum are those of the batches, kv heads and blocks that share the mask.
  int64_t turn_of(const Task& task, int64_t tile) const {
    const int64_t heads = shared(1) ? 1 : heads_kv_;
    const int64_t head = shared(1) ? 0 : task.kv_head;
    const int64_t block = shared(3) ? 0 : task.block;
    const int64_t sum = (block * view_.size[0] + task.batch % view_.size[0]) * heads + head;
    return first_turn_ + sum * query_tiles_ + tile;
  }
  int64_t position_of(const Task& task) const {
    const int64_t batches = shared(0) ? batches_ : 1, heads = shared(1) ? heads_kv_ : 1;
    const int64_t block = shared(3) ? task.block : 0, batch = shared(0) ? task.batch : 0;
    const int64_t head = shared(1) ? task.kv_head : 0;
    return (block * batches + batch) * heads + head;
  }
  bool shared(int dimension) const { return view_.size[dimension] == 1; }

  const UntypedView4 view_;
  const int64_t batches_, heads_kv_, group_, query_tiles_, block_keys_;
  Turns& turns_;
  const int64_t first_turn_;
};

}  // namespace flashattn::cpu
