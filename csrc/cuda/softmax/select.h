// Which softmax kernel runs, and how wide. Host C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_schedule.h"

namespace flashattn::cuda {

enum class RowKernel : uint8_t {
  warp,                // a row in the registers of up to 32 lanes
  block,               // a row in the registers of a block, each exp computed once
  held_in_registers,   // a row in the registers of a block or a cluster, 16-bit elements as such
  held_between_edges,  // the same of a row that begins anywhere
  held_in_shared,      // a row in the shared memory of a block or a cluster
  held_in_both,        // a row in the registers and the shared memory of a cluster
  online,              // a row in pieces, read twice
};

struct RowPlan {
  RowKernel kernel;
  int threads;         // per block
  int lanes = 32;      // warp: lanes per row
  int elements = 0;    // warp, block: of each operand in a thread
  int cluster = 1;     // held: blocks per row
  int capacity = 0;    // held, online: chunks in a block
  int64_t pieces = 1;  // online: blocks per row
};

// What a device offers and how the kernels were compiled.
struct RowLimits {
  int multiprocessors;
  int cluster;        // the most blocks in a cluster; 1: no clusters
  int shared_chunks;  // chunks of a row that fit into a multiprocessor's shared memory
  int chunk_elements;
  bool whole_chunks;   // rows begin and end on chunk boundaries, and 16 bytes are taken at a time
  bool alike = false;  // not so, but operands and result lie alike to the chunk boundaries
  // Of each operand in a thread: the warp kernel and small blocks; other blocks; held in registers.
  int few_elements, more_elements, held_chunks;
  int block_threads;  // the most for the block kernel
  int held_cluster;   // the most blocks that hold a row in registers before shared memory helps
};
inline constexpr int kAnyCluster = 1 << 20;  // it never does

inline int power_of_two_above(int64_t value, int least, int most) {
  int power = least;
  while (power < value && power < most) power *= 2;
  return power;
}

inline int whole_warps(int64_t threads) { return static_cast<int>(divide_up(threads, 32) * 32); }

// Blocks of a cluster for a row of some size, of which a block has room for `room`: few, but few
// rows are spread over idle multiprocessors, `least` or more in each block.
inline int cluster_for(int64_t rows, int64_t size, int64_t room, int64_t least,
                       const RowLimits& limits) {
  const int most = std::min(limits.cluster, 8);
  int cluster = power_of_two_above(divide_up(size, room), 1, most);
  while (cluster < most && rows * cluster * 2 <= limits.multiprocessors && size > cluster * least) {
    cluster *= 2;
  }
  return cluster;
}

// Pieces for several blocks per multiprocessor, but none below what a block holds.
inline RowPlan plan_online(int64_t rows, int64_t chunks, int capacity, const RowLimits& limits) {
  const int64_t wanted = divide_up(int64_t{24} * limits.multiprocessors, rows);
  return {.kernel = RowKernel::online,
          .threads = 256,
          .capacity = capacity,
          .pieces = std::min({wanted, int64_t{1024}, divide_up(chunks, capacity)})};
}

// Rows of whole chunks that a warp cannot hold. Two blocks of 512 threads share a multiprocessor,
// so that one loads while the other stores; larger blocks only where a cluster has no room.
inline RowPlan select_for_whole_chunks(int64_t rows, int64_t length, const RowLimits& limits) {
  const int64_t few = divide_up(length, limits.few_elements);
  const int64_t more = divide_up(length, limits.more_elements);
  if (few <= 64 || more <= limits.block_threads) {
    return {.kernel = RowKernel::block,
            .threads = whole_warps(few <= 64 ? few : more),
            .elements = few <= 64 ? limits.few_elements : limits.more_elements};
  }
  const int64_t chunks = length / limits.chunk_elements;
  const int64_t threads = divide_up(chunks, limits.held_chunks);
  // A cluster starts when all its blocks have room: a smaller one, of blocks that hold more, waits
  // less.
  const int64_t room = 2 * 512 * limits.held_chunks;
  if (limits.cluster > 1 && threads > 512 * limits.held_cluster && chunks <= 8 * room) {
    const int cluster = cluster_for(rows, chunks, room, room / 2, limits);
    return {.kernel = RowKernel::held_in_both,
            .threads = 512,
            .cluster = cluster,
            .capacity = static_cast<int>(divide_up(chunks, cluster))};
  }
  int cluster = cluster_for(rows, threads, 512, 128, limits);
  if (threads > 1024 * cluster) cluster = limits.cluster;
  if (threads > 1024 * cluster) {
    return plan_online(rows, chunks, 256 * limits.held_chunks, limits);
  }
  const int block_threads = whole_warps(divide_up(threads, cluster));
  return {.kernel = RowKernel::held_in_registers,
          .threads = block_threads,
          .cluster = cluster,
          .capacity = block_threads * limits.held_chunks};
}

// Rows that begin anywhere: six blocks share a multiprocessor's memory, or fewer for longer rows.
inline RowPlan select_for_any(int64_t rows, int64_t length, const RowLimits& limits) {
  const int64_t chunks = divide_up(length + limits.chunk_elements - 1, limits.chunk_elements);
  for (const int sharing : {6, 3, 2, 1}) {
    const int64_t room = limits.shared_chunks / sharing;
    int cluster = cluster_for(rows, chunks, room, 512, limits);
    if (sharing == 1 && chunks > room * cluster) cluster = limits.cluster;
    if (chunks > room * cluster) continue;
    const int64_t capacity = divide_up(chunks, cluster);
    return {.kernel = RowKernel::held_in_shared,
            .threads = std::min(whole_warps(divide_up(capacity, 4)), sharing == 6 ? 256 : 512),
            .cluster = cluster,
            .capacity = static_cast<int>(capacity)};
  }
  return plan_online(rows, chunks, limits.shared_chunks / 6, limits);
}

inline RowPlan select_row_kernel(int64_t rows, int64_t length, const RowLimits& limits) {
  const int64_t threads = divide_up(length, limits.few_elements);
  if (threads <= 32) {
    return {.kernel = RowKernel::warp,
            .threads = 128,
            .lanes = power_of_two_above(threads, 1, 32),
            .elements = limits.few_elements};
  }
  if (limits.whole_chunks) return select_for_whole_chunks(rows, length, limits);
  if (limits.alike) {
    RowPlan plan = select_for_whole_chunks(rows, length, limits);
    if (plan.kernel == RowKernel::held_in_registers && plan.cluster <= 8) {
      plan.kernel = RowKernel::held_between_edges;
      return plan;
    }
  }
  return select_for_any(rows, length, limits);
}

// The column kernel: lanes across (packs of) columns, the other threads along the length.
struct ColumnPlan {
  int lanes, threads;
};

// 32 lanes, or fewer, down to `least_lanes`, where a block then holds whole columns.
inline ColumnPlan select_column_kernel(int64_t packs, int64_t length, int thread_lines,
                                       int least_lanes) {
  constexpr int kThreads = 512;
  int lanes = power_of_two_above(packs, 1, 32);
  while (lanes > least_lanes && kThreads / lanes * int64_t{thread_lines} < length) lanes /= 2;
  const int lines = power_of_two_above(divide_up(length, thread_lines), 1, kThreads / lanes);
  return {lanes, std::max(lanes * lines, 32)};
}

}  // namespace flashattn::cuda
