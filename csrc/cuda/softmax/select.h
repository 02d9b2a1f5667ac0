// Which softmax kernel runs, and how wide. Host C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_schedule.h"

namespace flashattn::cuda {

enum class RowKernel : uint8_t {
  warp,    // a row in the registers of up to 32 lanes
  block,   // a row in the registers of a block
  shared,  // a row in the shared memory of a block or a cluster
  online,  // a row in pieces, read twice
};

struct RowPlan {
  RowKernel kernel;
  int threads;         // per block
  int lanes = 32;      // warp: lanes per row
  int cluster = 1;     // shared: blocks per row
  int capacity = 0;    // shared, online: chunks that a block holds
  int64_t pieces = 1;  // online: blocks per row
};

// What a device offers and how the kernels were compiled.
struct RowLimits {
  int multiprocessors;
  int cluster;        // the most blocks in a cluster; 1: no clusters
  int shared_chunks;  // chunks of a row that fit into a multiprocessor's shared memory
  int chunk_elements;
  int elements;       // that a thread of the warp and block kernels holds
  bool whole_chunks;  // rows begin and end on chunk boundaries
  bool has_block;     // the block kernel exists for this type
};

inline int power_of_two_above(int64_t value, int least, int most) {
  int power = least;
  while (power < value && power < most) power *= 2;
  return power;
}

inline int whole_warps(int64_t threads) { return static_cast<int>(divide_up(threads, 32) * 32); }

//   threads that hold the row in registers
//   <= 32                     warp
//   <= 512                    block, if rows consist of whole chunks
//   chunks
//   <= a sixth of the shared memory of a multiprocessor     shared: six blocks share it, so that
//      some load while others store
//   <= that of up to 8 blocks, then a third, a half, all    shared, in clusters
//   <= that of 16 blocks, where the device has room         shared
//   more                                                    online
inline RowPlan select_row_kernel(int64_t rows, int64_t length, const RowLimits& limits) {
  const int64_t threads = divide_up(length, limits.elements);
  if (threads <= 32) {
    return {.kernel = RowKernel::warp, .threads = 128, .lanes = power_of_two_above(threads, 1, 32)};
  }
  if (threads <= 512 && limits.whole_chunks && limits.has_block) {
    return {.kernel = RowKernel::block, .threads = whole_warps(threads)};
  }

  const int64_t unaligned = limits.whole_chunks ? 0 : limits.chunk_elements - 1;
  const int64_t chunks = divide_up(length + unaligned, limits.chunk_elements);
  const int portable = std::min(limits.cluster, 8);
  for (const int blocks_per_multiprocessor : {6, 3, 2, 1}) {
    const int room = limits.shared_chunks / blocks_per_multiprocessor;
    if (chunks > int64_t{room} * portable && blocks_per_multiprocessor > 1) continue;
    int cluster = power_of_two_above(divide_up(chunks, room), 1, portable);
    // Few rows are spread over idle multiprocessors.
    while (cluster < portable && rows * cluster * 2 <= limits.multiprocessors &&
           chunks > cluster * 512) {
      cluster *= 2;
    }
    if (chunks > int64_t{room} * cluster) cluster = limits.cluster;
    const int64_t capacity = divide_up(chunks, cluster);
    if (capacity > room) break;
    return {.kernel = RowKernel::shared,
            .threads = std::min(whole_warps(divide_up(capacity, 4)),
                                blocks_per_multiprocessor == 6 ? 256 : 512),
            .cluster = cluster,
            .capacity = static_cast<int>(capacity)};
  }

  // Enough pieces for several blocks per multiprocessor, but none below what a block holds.
  const int capacity = limits.shared_chunks / 6;
  const int64_t wanted = divide_up(int64_t{24} * limits.multiprocessors, rows);
  return {.kernel = RowKernel::online,
          .threads = 256,
          .capacity = capacity,
          .pieces = std::min({wanted, int64_t{1024}, divide_up(chunks, capacity)})};
}

// The column kernel: lanes across (packs of) columns, the other threads along the length.
struct ColumnPlan {
  int lanes, threads;
};

inline ColumnPlan select_column_kernel(int64_t packs, int64_t length, int thread_lines) {
  const int lanes = power_of_two_above(packs, 1, 32);
  const int lines = power_of_two_above(divide_up(length, thread_lines), 1, 512 / lanes);
  return {lanes, std::max(lanes * lines, 32)};
}

}  // namespace flashattn::cuda
