// From a problem to a kernel launch, for one direction and one pair of types.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/softmax/column_kernel.cuh"
#include "cuda/softmax/row_kernels.cuh"
#include "cuda/softmax/select.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

// How many elements of each operand a thread of the row kernels holds. Many are for wide access
// only; with a result wider than the input they are fewer, since registers would spill.
template <class Direction, class Access>
inline constexpr int kFew =
    64 / static_cast<int>(sizeof(typename Direction::Real)) / Direction::kOperands;
template <class Direction, class Access>
inline constexpr int kMany = kFew<Direction, Access>;
template <class Direction>
inline constexpr int kMany<Direction, WideAccess> =
    (sizeof(typename Direction::Written) > sizeof(typename Direction::Read) ? 24 : 32) /
    Direction::kOperands;

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

template <class Direction, class Access>
void launch_rows(const OpScope& scope, const Tensors<Direction>& tensors,
                 const Direction& direction, const Workspace& workspace) {
  constexpr int kFewElements = kFew<Direction, Access>;
  constexpr int kManyElements = kMany<Direction, Access>;
  const SoftmaxShape& shape = tensors.shape;
  const int64_t rows = shape.outer;
  const DeviceProperties& device = scope.device();
  RowLimits limits{.multiprocessors = device.multiprocessors,
                   .cluster = device.max_cluster,
                   .few_elements = kFewElements,
                   .many_elements = kManyElements};
  RowPlan plan = select_row_kernel(rows, shape.length, limits);
  const auto large_block = softmax_block_kernel<Direction, Access, kManyElements>;
  const auto grid_of = [&] {
    return Grid{.blocks = rows * plan.cluster, .threads = plan.threads, .cluster = plan.cluster};
  };
  if (plan.cluster > kPortableCluster && !fits_cluster(scope, grid_of(), large_block)) {
    limits.cluster = kPortableCluster;
    plan = select_row_kernel(rows, shape.length, limits);
  }

  switch (plan.kernel) {
    case RowKernel::warp: {
      const int64_t rows_per_block = plan.threads / plan.lanes;
      return launch(scope, {divide_up(rows, rows_per_block), plan.threads},
                    softmax_warp_kernel<Direction, Access, kFewElements>, tensors, direction,
                    exponent_of(plan.lanes));
    }
    case RowKernel::block:
      return launch(scope, grid_of(), softmax_block_kernel<Direction, Access, kFewElements>,
                    tensors, direction, 0);
    case RowKernel::large_block:
      return launch(scope, grid_of(), large_block, tensors, direction, exponent_of(plan.cluster));
    case RowKernel::online: {
      constexpr int64_t kChunk = Chunk<typename Direction::Read>::kSize;
      const int64_t length = divide_up(divide_up(shape.length, plan.pieces), kChunk) * kChunk;
      const Pieces pieces{divide_up(shape.length, length), length};
      const Grid grid{.blocks = rows * pieces.count, .threads = plan.threads};
      using State = typename Direction::State;
      auto* states = static_cast<State*>(workspace(grid.blocks * int64_t{sizeof(State)}));
      launch(scope, grid, softmax_online_states_kernel<Direction, Access, kFewElements>, tensors,
             direction, pieces, states);
      return launch(scope, grid, softmax_online_results_kernel<Direction, Access, kFewElements>,
                    tensors, direction, pieces, states);
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
  const ColumnPlan plan = select_column_kernel(
      packs, tensors.shape.length, kColumnLines<Direction>);
  launch(scope,
         {.blocks = divide_up(packs, plan.lanes),
          .threads = plan.threads,
          .shared_bytes = plan.threads * kColumns * static_cast<int>(sizeof(State))},
         softmax_column_kernel<Direction, Access>, tensors, direction, plan.lanes);
}

template <class Direction>
void launch_direction(const OpScope& scope, const Tensors<Direction>& tensors,
                      const Direction& direction, const Workspace& workspace) {
  constexpr int64_t kChunk = Chunk<typename Direction::Read>::kSize;
  const SoftmaxShape& shape = tensors.shape;
  const bool rows = shape.inner == 1;
  bool wide = has_whole_chunks(tensors, rows ? shape.length : shape.inner);
  for (const SoftmaxOperand& operand : tensors.operand) {
    wide &= rows ? operand.length_stride == 1 : operand.length_stride % kChunk == 0;
  }
  if constexpr (sizeof(typename Direction::Read) == 8) wide = false;  // nothing to gain

  if (!wide && rows) {
    launch_rows<Direction, ElementAccess>(scope, tensors, direction, workspace);
  } else if (!wide) {
    launch_columns<Direction, ElementAccess>(scope, tensors, direction);
  } else if constexpr (sizeof(typename Direction::Read) < 8) {
    if (rows) {
      launch_rows<Direction, WideAccess>(scope, tensors, direction, workspace);
    } else {
      launch_columns<Direction, WideAccess>(scope, tensors, direction);
    }
  }
}

}  // namespace flashattn::cuda
