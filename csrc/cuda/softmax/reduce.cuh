// Joining the States of threads: across lanes by shuffles, across warps through shared memory,
// across the blocks of a cluster through distributed shared memory.
#pragma once

#include <cooperative_groups.h>

namespace flashattn::cuda {

template <class State>
__device__ State shuffle_xor(State state, int distance) {
  static_assert(sizeof(State) % 4 == 0);
  union {
    State state;
    uint32_t word[sizeof(State) / 4];
  } value{state};
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(State) / 4); ++i) {
    value.word[i] = __shfl_xor_sync(0xffffffffu, value.word[i], distance);
  }
  return value.state;
}

// Every lane gets the State of its group of `lanes` (a power of two) neighbours.
template <class Direction>
__device__ typename Direction::State join_lanes(typename Direction::State state, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    state = Direction::join(state, shuffle_xor(state, distance));
  }
  return state;
}

// Every thread gets the State of the block. One barrier; `shared` must not be in use for another
// call that some thread has not left.
template <class Direction>
__device__ typename Direction::State join_block(typename Direction::State state,
                                                typename Direction::State (&shared)[32]) {
  state = join_lanes<Direction>(state, 32);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return state;
  if (lane == 0) shared[threadIdx.x / 32] = state;
  __syncthreads();
  return join_lanes<Direction>(lane < warps ? shared[lane] : Direction::empty(), 32);
}

// Every thread gets the State of the cluster. Blocks leave together, since they read each other's
// shared memory.
template <class Direction>
__device__ typename Direction::State join_cluster(typename Direction::State state,
                                                  typename Direction::State& shared) {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  if (threadIdx.x == 0) shared = state;
  cluster.sync();
  state = *cluster.map_shared_rank(&shared, 0);
  for (int rank = 1; rank < blocks; ++rank) {
    state = Direction::join(state, *cluster.map_shared_rank(&shared, rank));
  }
  cluster.sync();
#endif
  return state;
}

}  // namespace flashattn::cuda
