// A row that begins anywhere: its whole 16-byte chunks in registers, and the few elements before
// and behind them in a lane each. Operands and result must lie alike to the multiples of 16 bytes.
#pragma once

#include "cuda/softmax/held_in_registers.cuh"

namespace flashattn::cuda {

template <class Direction>
class HeldBetweenEdges {
  using Read = typename Direction::Read;
  using Real = typename Direction::Real;
  static constexpr int kChunk = Row<Direction>::kChunk;

 public:
  __device__ HeldBetweenEdges(void*, int) : inside_(nullptr, 0) {}

  // Holds the whole chunks [begin, end) of `row`, and its edges where `begin` is 0.
  __device__ void load(const Row<Direction>& row, int begin, int end) {
    const Row<Direction> inside = row.whole_part();
    inside_.load(inside, begin, min(end, inside.length / kChunk));
    const int head = row.before_whole_part(), lane = threadIdx.x;
    edge_ = lane < kChunk ? lane : head + inside.length + lane - kChunk;
    has_edge_ = begin == 0 && edge_ < (lane < kChunk ? head : row.length);
    if (lane >= 2 * kChunk) has_edge_ = false;
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      if (has_edge_) edge_value_[o] = row.operand[o][edge_];
    }
  }

  __device__ typename Direction::State add_to(typename Direction::State state,
                                              const Direction& direction) const {
    state = inside_.add_to(state, direction);
    if (!has_edge_) return state;
    Real x[Direction::kOperands][1];
    widen_edge(x);
    return direction.add(state, x);
  }

  __device__ void store_results(const Direction& direction, const Row<Direction>& row,
                                typename Direction::Totals totals) const {
    inside_.store_results(direction, row.whole_part(), totals);
    if (has_edge_) {
      Real x[Direction::kOperands][1];
      widen_edge(x);
      row.result[edge_] = convert<typename Direction::Written>(direction.result(x, 0, totals));
    }
  }

 private:
  __device__ void widen_edge(Real (&x)[Direction::kOperands][1]) const {
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) x[o][0] = convert<Real>(edge_value_[o]);
  }

  HeldInRegisters<Direction> inside_;
  Read edge_value_[Direction::kOperands];
  int edge_;
  bool has_edge_;
};

}  // namespace flashattn::cuda
