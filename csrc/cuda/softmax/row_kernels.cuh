// The kernels for rows (inner == 1): warp, block and online. `select.h` says which one runs.
#pragma once

#include "cuda/softmax/reduce.cuh"
#include "cuda/softmax/row.cuh"

namespace flashattn::cuda {

// Short rows: 2^lane_bits neighbouring lanes hold a row; neighbouring groups take neighbouring rows.
template <class Direction, class Access, int Count>
__global__ void __launch_bounds__(128)
    softmax_warp_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                        int lane_bits) {
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool exists = index < tensors.shape.outer;  // a row past the end is one of length 0
  const Row<Direction> row(tensors, exists ? index : 0, 0, exists ? tensors.shape.length : 0);

  Fragment<Direction, Access, Count> fragment;
  fragment.load(tensors, row, lane, lanes);
  const auto state = direction.gather(fragment.value, lanes);
  const auto totals = direction.totals_of_gathered(state, state);
  fragment.store(row, lane, lanes, [&](int i) {
    return direction.result_of_gathered(fragment.value, i, totals);
  });
}

// Middle rows: a block, or the 2^cluster_bits blocks of a cluster, hold a row.
template <class Direction, class Access, int Count>
__global__ void __launch_bounds__(1024)
    softmax_block_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                         int cluster_bits) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  __shared__ State block_state;
  const int cluster = 1 << cluster_bits, rank = blockIdx.x & (cluster - 1);
  const Row<Direction> row(tensors, blockIdx.x >> cluster_bits, 0, tensors.shape.length);
  const int thread = rank * blockDim.x + threadIdx.x, step = cluster * blockDim.x;

  Fragment<Direction, Access, Count> fragment;
  fragment.load(tensors, row, thread, step);
  const State own = direction.gather(fragment.value, 32);
  State state = join_warps<Direction>(own, warp_states);
  if (cluster > 1) state = join_blocks<Direction>(state, block_state);
  const auto totals = direction.totals_of_gathered(own, state);
  fragment.store(row, thread, step, [&](int i) {
    return direction.result_of_gathered(fragment.value, i, totals);
  });
}

// Long or few rows: each row is cut into `count` pieces of `length` elements, a piece per block.
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

// Calls body(fragment, part) for consecutive parts of a piece, as large as the block's registers.
template <class Direction, class Access, int Count, class Body>
__device__ void for_each_part(const Tensors<Direction>& tensors, const Row<Direction>& piece,
                              const Body& body) {
  const int held = Count * blockDim.x;
  for (Row<Direction> part = piece; part.length > 0; part.advance(tensors, held)) {
    Fragment<Direction, Access, Count> fragment;
    fragment.load(tensors, part, threadIdx.x, blockDim.x);
    body(fragment, part);
  }
}

// First pass: the State of each piece.
template <class Direction, class Access, int Count>
__global__ void __launch_bounds__(256)
    softmax_online_states_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                 Direction direction, Pieces pieces,
                                 typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  const Row<Direction> piece = piece_of(tensors, blockIdx.x, pieces);
  State state = Direction::empty();
  for_each_part<Direction, Access, Count>(
      tensors, piece, [&](const auto& fragment, const Row<Direction>&) {
        state = direction.add(state, fragment.value);
      });
  state = join_warps<Direction>(join_lanes<Direction>(state), warp_states);
  if (threadIdx.x == 0) states[blockIdx.x] = state;
}

// Second pass: joins the States of a row and writes the results of a piece. Pieces are taken from
// the last to the first, since the last ones read are those that L2 still holds.
template <class Direction, class Access, int Count>
__global__ void __launch_bounds__(256)
    softmax_online_results_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                  Direction direction, Pieces pieces,
                                  const typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  const int64_t index = gridDim.x - 1 - int64_t{blockIdx.x};
  const State* row_states = states + index / pieces.count * pieces.count;
  State state = Direction::empty();
  for (int64_t p = threadIdx.x; p < pieces.count; p += blockDim.x) {
    state = Direction::join(state, row_states[p]);
  }
  state = join_warps<Direction>(join_lanes<Direction>(state), warp_states);
  const auto totals = direction.totals(state);
  const Row<Direction> piece = piece_of(tensors, index, pieces);
  for_each_part<Direction, Access, Count>(
      tensors, piece, [&](const auto& fragment, const Row<Direction>& part) {
        fragment.store(part, threadIdx.x, blockDim.x,
                       [&](int i) { return direction.result(fragment.value, i, totals); });
      });
}

}  // namespace flashattn::cuda
