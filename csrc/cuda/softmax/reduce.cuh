// Joining the States of a block through shared memory, and of a cluster through that of all its
// blocks. (Of a warp: Direction::join_lanes.)
#pragma once

#include "core/dtype.h"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {

// Every thread gets the State of the block, given its warp's. One barrier; `shared` must not be in
// use for another call that some thread has not left.
template <class Direction>
__device__ typename Direction::State join_warps(typename Direction::State state,
                                                typename Direction::State (&shared)[32]) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return state;
  if (lane == 0) shared[threadIdx.x / 32] = state;
  __syncthreads();
  return Direction::join_lanes(lane < warps ? shared[lane] : Direction::empty(), 32);
}

// Joins the States of a cluster's blocks, once. Each block writes its State into all of them; none
// reads from another, so a block may leave when it has what it waited for. Members are shared
// memory.
template <class Direction>
class ClusterJoin {
  using State = typename Direction::State;
  static constexpr int kMostBlocks = 16;
  struct Words {
    uint32_t word[sizeof(State) / 4];
  };

 public:
  // Call first: other blocks write here only once they know that this one has started.
  __device__ void start() {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&arrived_, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect(&arrived_, ptx::cluster_blocks() * sizeof(State));
    }
    ptx::cluster_arrive_relaxed();
  }

  // Every thread gets the State of the cluster, given its block's.
  __device__ State join(State state) {
    const uint32_t blocks = ptx::cluster_blocks(), lane = threadIdx.x % 32;
    ptx::cluster_wait();
    if (threadIdx.x < blocks) {
      const uint32_t barrier = ptx::address_in_block(ptx::shared_address(&arrived_), threadIdx.x);
      const uint32_t to =
          ptx::address_in_block(ptx::shared_address(&states_[ptx::cluster_rank()]), threadIdx.x);
      const Words words = bit_cast<Words>(state);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(State) / 4); ++i) {
        ptx::store_async(to + 4 * i, words.word[i], barrier);
      }
    }
    __syncwarp();
    ptx::mbarrier_wait(&arrived_, 0);
    return Direction::join_lanes(lane < blocks ? states_[lane] : Direction::empty(), 32);
  }

 private:
  State states_[kMostBlocks];
  uint64_t arrived_;
};

}  // namespace flashattn::cuda
