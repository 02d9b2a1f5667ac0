// The kernels for rows (inner == 1). `select.h` says which one runs.
#pragma once

#include "cuda/softmax/fragment.cuh"
#include "cuda/softmax/held_between_edges.cuh"
#include "cuda/softmax/held_in_registers.cuh"
#include "cuda/softmax/held_in_shared.cuh"
#include "cuda/softmax/reduce.cuh"

namespace flashattn::cuda {

// Short rows: 2^lane_bits neighbouring lanes hold a row in registers; neighbouring groups of lanes
// take neighbouring rows.
template <class Direction, class Access, int Count>
__global__ void __launch_bounds__(128)
    softmax_warp_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                        int lane_bits) {
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t index =
      int64_t{blockIdx.x} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool exists = index < tensors.shape.outer;  // a row past the end is one of length 0
  const Row<Direction> row(tensors, exists ? index : 0, 0, exists ? tensors.shape.length : 0);

  Fragment<Direction, Access, Count> fragment;
  fragment.load(row, lane, lanes);
  const auto state = direction.gather(fragment.value, lanes);
  const auto totals = direction.totals_of_gathered(state, state);
  fragment.store(row, lane, lanes,
                 [&](int i) { return direction.result_of_gathered(fragment.value, i, totals); });
}

// Middle rows: a block holds a row in registers.
template <class Direction, int Count>
__global__ void __launch_bounds__(1024)
    softmax_block_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  const Row<Direction> row(tensors, blockIdx.x, 0, tensors.shape.length);

  Fragment<Direction, WideAccess, Count> fragment;
  fragment.load(row, threadIdx.x, blockDim.x);
  const State own = direction.gather(fragment.value, 32);
  const auto totals = direction.totals_of_gathered(own, join_warps<Direction>(own, warp_states));
  fragment.store(row, threadIdx.x, blockDim.x,
                 [&](int i) { return direction.result_of_gathered(fragment.value, i, totals); });
}

// Large rows, and rows that begin anywhere: a block, or the 2^cluster_bits blocks of a cluster,
// hold a row, `capacity` chunks in each, and ask for their part of the row `ahead` rows behind (0:
// of none). Held: one of the Held classes.
template <class Direction, class Held>
__global__ void __launch_bounds__(1024)
    softmax_held_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                        int cluster_bits, int capacity, int ahead) {
  using State = typename Direction::State;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ State warp_states[32];
  __shared__ ClusterJoin<Direction> cluster;
  if (cluster_bits > 0) cluster.start();
  const int64_t index = blockIdx.x >> cluster_bits;
  const Row<Direction> row(tensors, index, 0, tensors.shape.length);
  const int begin = (blockIdx.x & ((1 << cluster_bits) - 1)) * capacity;

  Held held(shared, capacity);
  held.load(row, begin, min(begin + capacity, row.chunks()));
  if (threadIdx.x == 0 && ahead > 0 && index + ahead < tensors.shape.outer) {
    const Row<Direction> later(tensors, index + ahead, 0, tensors.shape.length);
    later.prefetch(begin, min(begin + capacity, later.chunks()));
  }
  State state = Direction::join_lanes(held.add_to(Direction::empty(), direction), 32);
  state = join_warps<Direction>(state, warp_states);
  if (cluster_bits > 0) state = cluster.join(state);
  held.store_results(direction, row, direction.totals(state));
}

// The longest rows are cut into `count` pieces of `length` elements, a piece per block, and read
// twice.
struct Pieces {
  int64_t count, length;
};

template <class Direction>
__device__ Row<Direction> piece_of(const Tensors<Direction>& tensors, int64_t index,
                                   Pieces pieces) {
  const int64_t begin = index % pieces.count * pieces.length;
  const int64_t end = begin + pieces.length;
  return Row<Direction>(tensors, index / pieces.count, begin,
                        end < tensors.shape.length ? end : tensors.shape.length);
}

// First pass: the State of each piece.
template <class Direction, class Held>
__global__ void __launch_bounds__(256)
    softmax_online_states_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                 Direction direction, Pieces pieces, int capacity,
                                 typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ State warp_states[32];
  const Row<Direction> piece = piece_of(tensors, blockIdx.x, pieces);
  Held held(shared, capacity);
  State state = Direction::empty();
  for (int begin = 0; begin < piece.chunks(); begin += capacity) {
    held.load(piece, begin, min(begin + capacity, piece.chunks()));
    state = held.add_to(state, direction);
  }
  state = join_warps<Direction>(Direction::join_lanes(state, 32), warp_states);
  if (threadIdx.x == 0) states[blockIdx.x] = state;
}

// Second pass: joins the States of a row and writes the results of a piece. Pieces are taken from
// the last to the first, since the last ones read are those that L2 still holds.
template <class Direction, class Held>
__global__ void __launch_bounds__(256)
    softmax_online_results_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                  Direction direction, Pieces pieces, int capacity,
                                  const typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ State warp_states[32];
  const int64_t index = gridDim.x - 1 - int64_t{blockIdx.x};
  const State* row_states = states + index / pieces.count * pieces.count;
  State state = Direction::empty();
  for (int64_t p = threadIdx.x; p < pieces.count; p += blockDim.x) {
    state = Direction::join(state, row_states[p]);
  }
  state = join_warps<Direction>(Direction::join_lanes(state, 32), warp_states);
  const auto totals = direction.totals(state);

  const Row<Direction> piece = piece_of(tensors, index, pieces);
  Held held(shared, capacity);
  for (int begin = 0; begin < piece.chunks(); begin += capacity) {
    held.load(piece, begin, min(begin + capacity, piece.chunks()));
    held.store_results(direction, piece, totals);
  }
}

}  // namespace flashattn::cuda
