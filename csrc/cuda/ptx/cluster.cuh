// Clusters of blocks and their shared memory (sm_90): one function per instruction. Before sm_90
// the functions do nothing, and no kernel that is launched calls them.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"

namespace flashattn::cuda::ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FLASHATTN_SM90(...) __VA_ARGS__
#else
#define FLASHATTN_SM90(...)
#endif

// Says that this block has come so far. It orders no memory accesses.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  FLASHATTN_SM90(asm volatile("barrier.cluster.arrive.relaxed.aligned;" :: : "memory"));
}

// Waits until all blocks of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
  FLASHATTN_SM90(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory"));
}

__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks = 1;
  FLASHATTN_SM90(asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks)));
  return blocks;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  FLASHATTN_SM90(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)));
  return rank;
}

// The address, in block `rank`, of what has this address here.
__device__ __forceinline__ uint32_t address_in_block(uint32_t shared_address, uint32_t rank) {
  uint32_t address = 0;
  FLASHATTN_SM90(
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank)));
  return address;
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  FLASHATTN_SM90(asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                              "r"(arrivals) : "memory"));
}

// Makes an initialised barrier visible to the other blocks, once these have seen this one arrive.
__device__ __forceinline__ void fence_mbarrier_init() {
  FLASHATTN_SM90(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
}

// Arrives, and lets the phase end only when `bytes` have been written as well.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  FLASHATTN_SM90(asm volatile(
      "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory"));
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  FLASHATTN_SM90(
      asm volatile("{\n"
                   ".reg .pred done;\n"
                   "again:\n"
                   "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                   "@!done bra again;\n"
                   "}" ::"r"(shared_address(barrier)),
                   "r"(parity) : "memory"));
}

// Writes a word into another block, whose barrier counts the bytes.
__device__ __forceinline__ void store_async(uint32_t address_there, uint32_t word,
                                            uint32_t barrier_there) {
  FLASHATTN_SM90(asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address_there),
      "r"(word), "r"(barrier_there) : "memory"));
}

#undef FLASHATTN_SM90

}  // namespace flashattn::cuda::ptx
