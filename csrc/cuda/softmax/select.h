// Which softmax kernel runs: one table, in terms of 16-byte chunks, so that it holds for every
// dtype. Host C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_schedule.h"

namespace flashattn::cuda {

enum class RowKernel : uint8_t {
  warp_many_rows,  // several rows per group of lanes, one chunk of each per thread
  warp,            // one row per group of lanes, four chunks per thread
  block,           // one row per block or cluster
  online,          // one row per many blocks, read twice
};

struct RowPlan {
  RowKernel kernel;
  int lanes = 32;        // warp kernels: lanes per row
  int threads = 128;     // per block
  int cluster = 1;       // block kernel: blocks per row
  int block_chunks = 0;  // block kernel: chunks of a row in one block
  int64_t pieces = 1;    // online kernel: blocks per row
};

// What a device offers.
struct RowLimits {
  int multiprocessors;
  int cluster;       // the most blocks in a cluster; 1: no clusters
  int warp_chunks;   // chunks of a row that a thread of the warp kernel holds
  int block_chunks;  // chunks of a row (of all its operands) that a block's shared memory holds
};

// What a thread of the warp kernels holds, of all operands together.
inline constexpr int kWarpChunks = 4;

inline int power_of_two_above(int64_t value, int least, int most) {
  int power = least;
  while (power < value && power < most) power *= 2;
  return power;
}

// `chunks`: of the longest row, at any alignment.
inline RowPlan select_row_kernel(int64_t rows, int64_t chunks, const RowLimits& limits) {
  if (chunks <= 16) {
    return {.kernel = RowKernel::warp_many_rows, .lanes = power_of_two_above(chunks, 1, 32)};
  }
  if (chunks <= 32 * limits.warp_chunks) {
    return {.kernel = RowKernel::warp,
            .lanes = power_of_two_above(divide_up(chunks, limits.warp_chunks), 1, 32)};
  }

  // Three blocks share a multiprocessor, so that one loads while another stores; larger blocks only
  // where the cluster has no room. Few rows are spread over more blocks.
  const int64_t comfortable = std::max(limits.block_chunks / 3, 1);
  int cluster = power_of_two_above(divide_up(chunks, comfortable), 1, limits.cluster);
  while (cluster < limits.cluster && rows * cluster * 2 <= limits.multiprocessors &&
         chunks > int64_t{512} * cluster) {
    cluster *= 2;
  }
  const int64_t block_chunks = divide_up(chunks, cluster);
  if (block_chunks <= limits.block_chunks) {
    const int64_t threads = divide_up(divide_up(block_chunks, 4), 32) * 32;
    return {.kernel = RowKernel::block,
            .threads = static_cast<int>(std::min<int64_t>(threads, 512)),
            .cluster = cluster,
            .block_chunks = static_cast<int>(block_chunks)};
  }

  // Enough pieces for a few blocks per multiprocessor, but none below a few passes of a block.
  const int64_t wanted = divide_up(int64_t{16} * limits.multiprocessors, rows);
  return {.kernel = RowKernel::online,
          .threads = 256,
          .pieces = std::clamp<int64_t>(wanted, 1, std::min<int64_t>(1024, chunks / 2048))};
}

// The column kernel: lanes across (packs of) columns, the other threads along the length.
struct ColumnPlan {
  int lanes, threads;
};

inline ColumnPlan select_column_kernel(int64_t columns, int64_t length, int pack_bytes,
                                       int thread_lines) {
  const int lanes = power_of_two_above(columns, 1, std::min(32, 128 / pack_bytes));
  const int lines = power_of_two_above(divide_up(length, thread_lines), 1, 512 / lanes);
  return {lanes, std::max(lanes * lines, 32)};
}

}  // namespace flashattn::cuda
