// Which softmax kernel runs, and how wide. Host C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_schedule.h"

namespace flashattn::cuda {

enum class RowKernel : uint8_t {
  warp,         // a row in the registers of up to 32 lanes, few elements in each
  block,        // a row in the registers of a block, few elements per thread
  large_block,  // a row in the registers of a block or a cluster, many elements per thread
  online,       // a row in pieces, read twice
};

struct RowPlan {
  RowKernel kernel;
  int threads;        // per block
  int lanes = 32;     // warp: lanes per row
  int cluster = 1;    // large_block: blocks per row
  int64_t pieces = 1;  // online: blocks per row
};

// What a device offers, and what a thread holds of each operand.
struct RowLimits {
  int multiprocessors;
  int cluster;      // the most blocks in a cluster; 1: no clusters
  int few_elements;  // warp, block and online kernels
  int many_elements;  // large_block kernel
};

inline int power_of_two_above(int64_t value, int least, int most) {
  int power = least;
  while (power < value && power < most) power *= 2;
  return power;
}

inline int whole_warps(int64_t threads) { return static_cast<int>(divide_up(threads, 32) * 32); }

//   length / elements per thread
//   <= 32 threads            warp
//   <= 512 threads of few    block: small blocks, many of them on a multiprocessor
//   <= 512 threads of many   large_block; then clusters of up to 8, so that two blocks still share
//      a multiprocessor and one loads while the other stores
//   <= 1024 threads of many  large_block in the largest cluster
//   longer                   online
inline RowPlan select_row_kernel(int64_t rows, int64_t length, const RowLimits& limits) {
  const int64_t few = divide_up(length, limits.few_elements);
  if (few <= 32) {
    return {.kernel = RowKernel::warp, .threads = 128, .lanes = power_of_two_above(few, 1, 32)};
  }
  if (few <= 512) return {.kernel = RowKernel::block, .threads = whole_warps(few)};

  const int64_t many = divide_up(length, limits.many_elements);
  int cluster = power_of_two_above(divide_up(many, 512), 1, std::min(limits.cluster, 8));
  // Few rows are spread over idle multiprocessors.
  while (cluster < std::min(limits.cluster, 8) && rows * cluster * 2 <= limits.multiprocessors &&
         many > cluster * 128) {
    cluster *= 2;
  }
  if (many > cluster * 1024) cluster = limits.cluster;
  if (many <= cluster * 1024) {
    return {.kernel = RowKernel::large_block,
            .threads = whole_warps(divide_up(many, cluster)),
            .cluster = cluster};
  }

  // Enough pieces for several blocks per multiprocessor, but none below a few passes of a block.
  constexpr int kThreads = 256;
  const int64_t wanted = divide_up(int64_t{16} * limits.multiprocessors, rows);
  const int64_t most = std::min<int64_t>(1024, few / (4 * kThreads));
  return {.kernel = RowKernel::online,
          .threads = kThreads,
          .pieces = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1))};
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
