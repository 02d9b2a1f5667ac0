// From a problem to a kernel launch, for one direction and one pair of types.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/softmax/column_kernel.cuh"
#include "cuda/softmax/row_kernels.cuh"
#include "cuda/softmax/select.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

// How many elements of each operand a thread of the warp and block kernels holds.
template <class Direction>
inline constexpr int kThreadElements =
    64 / static_cast<int>(sizeof(typename Direction::Real)) / Direction::kOperands;

// Wide access to fp64 has nothing to gain and is not compiled.
template <class Direction>
inline constexpr bool kHasWide = sizeof(typename Direction::Read) < 8;

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

template <class Direction>
void launch_rows(const OpScope& scope, const Tensors<Direction>& tensors,
                 const Direction& direction, const Workspace& workspace) {
  constexpr int kChunk = Chunk<typename Direction::Read>::kSize;
  constexpr int kElements = kThreadElements<Direction>, kChunkBytes = 16 * Direction::kOperands;
  const SoftmaxShape& shape = tensors.shape;
  const int64_t rows = shape.outer;
  const DeviceProperties& device = scope.device();
  RowLimits limits{.multiprocessors = device.multiprocessors,
                   .cluster = device.max_cluster,
                   .shared_chunks = (device.shared_bytes_per_block - 8 * 1024) / kChunkBytes,
                   .chunk_elements = kChunk,
                   .elements = kElements,
                   .whole_chunks = has_whole_chunks(tensors, shape.length),
                   .has_block = kHasWide<Direction>};
  RowPlan plan = select_row_kernel(rows, shape.length, limits);
  const auto shared_grid = [&](int64_t blocks) {
    return Grid{.blocks = blocks,
                .threads = plan.threads,
                .shared_bytes = plan.capacity * kChunkBytes,
                .cluster = plan.cluster};
  };
  if (plan.cluster > kPortableCluster &&
      !fits_cluster(scope, shared_grid(rows * plan.cluster), softmax_shared_kernel<Direction>)) {
    limits.cluster = kPortableCluster;
    plan = select_row_kernel(rows, shape.length, limits);
  }

  switch (plan.kernel) {
    case RowKernel::warp: {
      const Grid grid{divide_up(rows, plan.threads / plan.lanes), plan.threads};
      if constexpr (kHasWide<Direction>) {
        if (limits.whole_chunks) {
          return launch(scope, grid, softmax_warp_kernel<Direction, WideAccess, kElements>, tensors,
                        direction, exponent_of(plan.lanes));
        }
      }
      return launch(scope, grid, softmax_warp_kernel<Direction, ElementAccess, kElements>, tensors,
                    direction, exponent_of(plan.lanes));
    }
    case RowKernel::block:
      if constexpr (kHasWide<Direction>) {
        launch(scope, {rows, plan.threads}, softmax_block_kernel<Direction, kElements>, tensors,
               direction);
      }
      return;
    case RowKernel::shared:
      return launch(scope, shared_grid(rows * plan.cluster), softmax_shared_kernel<Direction>,
                    tensors, direction, exponent_of(plan.cluster), plan.capacity);
    case RowKernel::online: {
      const int64_t length = divide_up(divide_up(shape.length, plan.pieces), kChunk) * kChunk;
      const Pieces pieces{divide_up(shape.length, length), length};
      const Grid grid = shared_grid(rows * pieces.count);
      using State = typename Direction::State;
      auto* states = static_cast<State*>(workspace(grid.blocks * int64_t{sizeof(State)}));
      launch(scope, grid, softmax_online_states_kernel<Direction>, tensors, direction, pieces,
             plan.capacity, states);
      return launch(scope, grid, softmax_online_results_kernel<Direction>, tensors, direction,
                    pieces, plan.capacity, static_cast<const State*>(states));
    }
  }
}

template <class Direction, class Access>
void launch_columns(const OpScope& scope, const Tensors<Direction>& tensors,
                    const Direction& direction) {
  using Read = typename Direction::Read;
  using State = typename Direction::State;
  constexpr int kColumns = kPackColumns<Access, Read>;
  const int64_t packs = divide_up(tensors.shape.outer * tensors.shape.inner, kColumns);
  const ColumnPlan plan =
      select_column_kernel(packs, tensors.shape.length, kColumnLines<Direction>);
  launch(scope,
         {.blocks = divide_up(packs, plan.lanes),
          .threads = plan.threads,
          .shared_bytes = plan.threads * kColumns * static_cast<int>(sizeof(State))},
         softmax_column_kernel<Direction, Access>, tensors, direction, plan.lanes);
}

template <class Direction>
void launch_direction(const OpScope& scope, const Tensors<Direction>& tensors,
                      const Direction& direction, const Workspace& workspace) {
  if (tensors.shape.inner == 1) return launch_rows(scope, tensors, direction, workspace);
  if constexpr (kHasWide<Direction>) {
    bool wide = has_whole_chunks(tensors, tensors.shape.inner);
    for (const SoftmaxOperand& operand : tensors.operand) {
      wide &= operand.length_stride % Chunk<typename Direction::Read>::kSize == 0;
    }
    if (wide) return launch_columns<Direction, WideAccess>(scope, tensors, direction);
  }
  launch_columns<Direction, ElementAccess>(scope, tensors, direction);
}

}  // namespace flashattn::cuda
