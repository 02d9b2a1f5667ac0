// From a problem to a kernel launch, for one direction and one pair of types.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/softmax/column_kernel.cuh"
#include "cuda/softmax/held_in_both.cuh"
#include "cuda/softmax/row_kernels.cuh"
#include "cuda/softmax/select.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

// How many elements of each operand a thread of the warp and block kernels holds, and how many
// threads the block kernel takes before holding elements in their own type is better. Measured:
// csrc/notes/0010-softmax-at-memory-speed.md.
template <class Direction>
struct Tuning {
  static constexpr int kReal = sizeof(typename Direction::Real);
  static constexpr int kMore = 64 / kReal / Direction::kOperands;
  static constexpr int kFew = kMore, kBlockThreads = 512;
  static constexpr bool kHeldInBoth = false;
};
template <class In, class Out>
struct Tuning<Forward<In, Out>> {
  static constexpr int kMore = 64 / static_cast<int>(sizeof(Accumulator<In>));
  static constexpr int kFew = sizeof(In) == 4 ? 8 : kMore;
  static constexpr int kBlockThreads = 64 * static_cast<int>(sizeof(In));
  static constexpr bool kHeldInBoth = sizeof(In) == 4;
};

// Whether all 16-byte pieces of the operands begin at multiples of 16 bytes, given that elements
// are adjacent along a dimension of this size.
template <class Direction>
bool has_whole_chunks(const Tensors<Direction>& tensors, int64_t adjacent) {
  constexpr int64_t kChunk = Chunk<typename Direction::Read>::kSize;
  bool whole = adjacent % kChunk == 0;
  for (const SoftmaxOperand& operand : tensors.operand) {
    whole &= reinterpret_cast<uintptr_t>(operand.data) % 16 == 0;
    for (int d = 0; d < operand.outer.rank; ++d) whole &= operand.outer.stride[d] % kChunk == 0;
  }
  return whole;
}

// Whether rows that begin anywhere may be held in registers.
template <class Direction>
inline constexpr bool kHeldBetweenEdges =
    sizeof(typename Direction::Read) < 8 &&
    sizeof(typename Direction::Read) == sizeof(typename Direction::Written);

// Whether the rows of all operands and of the result lie alike to the multiples of 16 bytes.
template <class Direction>
bool rows_lie_alike(const Tensors<Direction>& tensors) {
  using Read = typename Direction::Read;
  const auto lead = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16; };
  bool alike = true;
  for (const SoftmaxOperand& operand : tensors.operand) {
    alike &= lead(operand.data) == lead(tensors.result);
    int64_t stride = tensors.shape.length;
    for (int d = operand.outer.rank - 1; d >= 0; --d) {
      alike &= (operand.outer.stride[d] - stride) % Chunk<Read>::kSize == 0;
      stride *= operand.outer.size[d];
    }
  }
  return alike;
}

inline Grid grid_of(const RowPlan& plan, int64_t blocks, int chunk_bytes) {
  return {.blocks = blocks,
          .threads = plan.threads,
          .shared_bytes = plan.capacity * chunk_bytes,
          .cluster = plan.cluster};
}

// How many rows ahead the held kernel asks for: a quarter of those that are held at once, 1024
// threads a multiprocessor.
inline int rows_ahead(const DeviceProperties& device, const RowPlan& plan) {
  return std::max(device.multiprocessors * 256 / (plan.threads * plan.cluster), 1);
}

// Held: where a block keeps its part of a row; chunk_bytes: of shared memory per chunk.
template <class Direction, class Held>
void launch_online(const OpScope& scope, const Tensors<Direction>& tensors,
                   const Direction& direction, const RowPlan& plan, int chunk_bytes,
                   const Workspace& workspace) {
  using State = typename Direction::State;
  constexpr int kChunk = Chunk<typename Direction::Read>::kSize;
  const SoftmaxShape& shape = tensors.shape;
  const int64_t length = divide_up(divide_up(shape.length, plan.pieces), kChunk) * kChunk;
  const Pieces pieces{divide_up(shape.length, length), length};
  const Grid grid = grid_of(plan, shape.outer * pieces.count, chunk_bytes);
  auto* states = static_cast<State*>(workspace(grid.blocks * int64_t{sizeof(State)}));
  launch(scope, grid, softmax_online_states_kernel<Direction, Held>, tensors, direction, pieces,
         plan.capacity, states);
  launch(scope, grid, softmax_online_results_kernel<Direction, Held>, tensors, direction, pieces,
         plan.capacity, static_cast<const State*>(states));
}

// A row is held by lanes, a block or a cluster, or taken in pieces. Access and Held go together: by
// 16 bytes and in registers, or by elements and in shared memory.
template <class Direction, class Access, class Held>
void launch_rows(const OpScope& scope, const Tensors<Direction>& tensors,
                 const Direction& direction, const Workspace& workspace) {
  using Tuned = Tuning<Direction>;
  constexpr bool kWhole = std::is_same_v<Access, WideAccess>;
  constexpr int kChunkBytes = 16 * Direction::kOperands, kHeldBytes = kWhole ? 0 : kChunkBytes;
  const int64_t rows = tensors.shape.outer, length = tensors.shape.length;
  const DeviceProperties& device = scope.device();
  RowLimits limits{.multiprocessors = device.multiprocessors,
                   .cluster = device.max_cluster,
                   .shared_chunks = (device.shared_bytes_per_block - 8 * 1024) / kChunkBytes,
                   .chunk_elements = Chunk<typename Direction::Read>::kSize,
                   .whole_chunks = kWhole,
                   .alike = !kWhole && kHeldBetweenEdges<Direction> && rows_lie_alike(tensors),
                   .few_elements = Tuned::kFew,
                   .more_elements = Tuned::kMore,
                   .held_chunks = HeldInRegisters<Direction>::kThreadChunks,
                   .block_threads = Tuned::kBlockThreads,
                   .held_cluster = kWhole && Tuned::kHeldInBoth ? 4 : kAnyCluster};
  RowPlan plan = select_row_kernel(rows, length, limits);
  const auto held_kernel = softmax_held_kernel<Direction, Held>;
  if (plan.cluster > kPortableCluster &&
      !fits_cluster(scope, grid_of(plan, rows * plan.cluster, kHeldBytes), held_kernel)) {
    limits.cluster = kPortableCluster;
    plan = select_row_kernel(rows, length, limits);
  }

  switch (plan.kernel) {
    case RowKernel::warp:
      return launch(scope, {divide_up(rows, plan.threads / plan.lanes), plan.threads},
                    softmax_warp_kernel<Direction, Access, Tuned::kFew>, tensors, direction,
                    exponent_of(plan.lanes));
    case RowKernel::block:
      if constexpr (kWhole) {
        const auto kernel = plan.elements == Tuned::kFew
                                ? softmax_block_kernel<Direction, Tuned::kFew>
                                : softmax_block_kernel<Direction, Tuned::kMore>;
        launch(scope, {rows, plan.threads}, kernel, tensors, direction);
      }
      return;
    case RowKernel::held_in_both:
      if constexpr (kWhole && Tuned::kHeldInBoth) {
        Grid grid = grid_of(plan, rows * plan.cluster, 0);
        const int in_registers = plan.threads * HeldInRegisters<Direction>::kThreadChunks;
        grid.shared_bytes = std::max(plan.capacity - in_registers, 0) * kChunkBytes;
        launch(scope, grid, softmax_held_kernel<Direction, HeldInBoth<Direction>>, tensors,
               direction, exponent_of(plan.cluster), plan.capacity, rows_ahead(device, plan));
      }
      return;
    case RowKernel::held_between_edges:
      if constexpr (!kWhole && kHeldBetweenEdges<Direction>) {
        launch(scope, grid_of(plan, rows * plan.cluster, 0),
               softmax_held_kernel<Direction, HeldBetweenEdges<Direction>>, tensors, direction,
               exponent_of(plan.cluster), plan.capacity, rows_ahead(device, plan));
      }
      return;
    case RowKernel::held_in_registers:
    case RowKernel::held_in_shared:
      return launch(scope, grid_of(plan, rows * plan.cluster, kHeldBytes), held_kernel, tensors,
                    direction, exponent_of(plan.cluster), plan.capacity, rows_ahead(device, plan));
    case RowKernel::online:
      return launch_online<Direction, Held>(scope, tensors, direction, plan, kHeldBytes, workspace);
  }
}

template <class Direction, class Access>
void launch_columns(const OpScope& scope, const Tensors<Direction>& tensors,
                    const Direction& direction) {
  using Read = typename Direction::Read;
  using State = typename Direction::State;
  constexpr int kColumns = ColumnPack<Access, Read>::kColumns;
  constexpr int kLeastLanes = kColumns > 1 ? 64 / (kColumns * static_cast<int>(sizeof(Read))) : 32;
  const int64_t packs = divide_up(tensors.shape.outer * tensors.shape.inner, kColumns);
  const ColumnPlan plan = select_column_kernel(packs, tensors.shape.length,
                                               kColumnLines<Direction, Access>, kLeastLanes);
  launch(scope,
         {.blocks = divide_up(packs, plan.lanes),
          .threads = plan.threads,
          .shared_bytes = plan.threads * kColumns * static_cast<int>(sizeof(State))},
         softmax_column_kernel<Direction, Access>, tensors, direction, plan.lanes);
}

template <class Direction>
void launch_direction(const OpScope& scope, const Tensors<Direction>& tensors,
                      const Direction& direction, const Workspace& workspace) {
  const SoftmaxShape& shape = tensors.shape;
  const bool rows = shape.inner == 1;
  if constexpr (sizeof(typename Direction::Read) < 8) {  // fp64 has nothing to gain
    bool whole = has_whole_chunks(tensors, rows ? shape.length : shape.inner);
    for (const SoftmaxOperand& operand : tensors.operand) {
      whole &= rows || operand.length_stride % Chunk<typename Direction::Read>::kSize == 0;
    }
    if (whole && rows) {
      return launch_rows<Direction, WideAccess, HeldInRegisters<Direction>>(scope, tensors,
                                                                            direction, workspace);
    }
    if (whole) return launch_columns<Direction, WideAccess>(scope, tensors, direction);
  }
  if (rows) {
    launch_rows<Direction, ElementAccess, HeldInShared<Direction>>(scope, tensors, direction,
                                                                   workspace);
  } else {
    launch_columns<Direction, ElementAccess>(scope, tensors, direction);
  }
}

}  // namespace flashattn::cuda
