// Joining the States of threads: across lanes by shuffles, across warps through shared memory,
// across the blocks of a cluster through distributed shared memory.
#pragma once

#include <cooperative_groups.h>

namespace flashattn::cuda {

template <class State>
__device__ State shuffle_xor(State state, int distance) {
  static_assert(sizeof(State) % 4 == 0);
  struct Words {
    uint32_t word[sizeof(State) / 4];
  };
  Words words = bit_cast<Words>(state);
#pragma unroll
  for (uint32_t& word : words.word) word = __shfl_xor_sync(0xffffffffu, word, distance);
  return bit_cast<State>(words);
}

// Every lane gets the State of the warp.
template <class Direction>
__device__ typename Direction::State join_lanes(typename Direction::State state) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    state = Direction::join(state, shuffle_xor(state, distance));
  }
  return state;
}

// Every thread gets the State of the block, given its warp's. One barrier; `shared` must not be in
// use for another call that some thread has not left.
template <class Direction>
__device__ typename Direction::State join_warps(typename Direction::State state,
                                                typename Direction::State (&shared)[32]) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return state;
  if (lane == 0) shared[threadIdx.x / 32] = state;
  __syncthreads();
  return join_lanes<Direction>(lane < warps ? shared[lane] : Direction::empty());
}

// Every thread gets the State of the cluster, given its block's. Blocks leave together, since they
// read each other's shared memory.
template <class Direction>
__device__ typename Direction::State join_blocks(typename Direction::State state,
                                                 typename Direction::State& shared) {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) shared = state;
  cluster.sync();
  const unsigned lane = threadIdx.x % 32;
  state = lane < cluster.num_blocks() ? *cluster.map_shared_rank(&shared, lane)
                                      : Direction::empty();
  state = join_lanes<Direction>(state);
  cluster.sync();
#endif
  return state;
}

}  // namespace flashattn::cuda
