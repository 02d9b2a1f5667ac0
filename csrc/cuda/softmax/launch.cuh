// From a problem to a kernel launch, for one direction and one pair of types.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/softmax/column_kernel.cuh"
#include "cuda/softmax/row_kernels.cuh"
#include "cuda/softmax/select.h"
#include "cuda/workspace.h"

namespace flashattn::cuda {

inline constexpr int kPortableCluster = 8;  // every device with clusters has this many blocks

template <class Direction>
void launch_rows(const OpScope& scope, const Tensors<Direction>& tensors,
                 const Direction& direction, const Workspace& workspace) {
  using Read = typename Direction::Read;
  using State = typename Direction::State;
  const SoftmaxShape& shape = tensors.shape;
  const int64_t rows = shape.outer;
  constexpr int64_t kChunk = Chunk<Read>::kSize;
  constexpr int kChunkBytes = 16 * Direction::kOperands;
  // Any row of a tensor may begin off a 16-byte boundary, unless all begin on one.
  bool aligned = shape.length % kChunk == 0;
  for (const SoftmaxOperand& operand : tensors.operand) {
    aligned &= reinterpret_cast<uintptr_t>(operand.data) % 16 == 0;
    for (int d = 0; d < operand.outer.rank; ++d) aligned &= operand.outer.stride[d] % kChunk == 0;
  }
  const int64_t chunks = divide_up(shape.length + (aligned ? 0 : kChunk - 1), kChunk);
  const DeviceProperties& device = scope.device();
  const RowPlan plan =
      select_row_kernel(rows, chunks,
                        {.multiprocessors = device.multiprocessors,
                         .cluster = device.has_clusters() ? kPortableCluster : 1,
                         .warp_chunks = kWarpChunks / Direction::kOperands,
                         .block_chunks = (device.shared_bytes_per_block - 1024) / kChunkBytes});

  switch (plan.kernel) {
    case RowKernel::warp_many_rows: {
      constexpr int kRows = kWarpChunks / Direction::kOperands;
      const int64_t per_block = plan.threads / plan.lanes * kRows;
      return launch(scope, {divide_up(rows, per_block), plan.threads},
                    softmax_warp_kernel<Direction, kRows, 1>, tensors, direction, plan.lanes);
    }
    case RowKernel::warp: {
      const int64_t per_block = plan.threads / plan.lanes;
      return launch(scope, {divide_up(rows, per_block), plan.threads},
                    softmax_warp_kernel<Direction, 1, kWarpChunks / Direction::kOperands>, tensors, direction,
                    plan.lanes);
    }
    case RowKernel::block: {
      return launch(scope,
                    {.blocks = rows * plan.cluster,
                     .threads = plan.threads,
                     .shared_bytes = plan.block_chunks * kChunkBytes,
                     .cluster = plan.cluster},
                    softmax_block_kernel<Direction>, tensors, direction, plan.cluster,
                    plan.block_chunks);
    }
    case RowKernel::online: {
      // Pieces end on chunk boundaries of a row that begins on one.
      const int64_t length = divide_up(divide_up(shape.length, plan.pieces), kChunk) * kChunk;
      const Pieces pieces{divide_up(shape.length, length), length};
      const int64_t blocks = rows * pieces.count;
      auto* states = static_cast<State*>(workspace(blocks * int64_t{sizeof(State)}));
      launch(scope, {blocks, plan.threads}, softmax_online_states_kernel<Direction>, tensors,
             direction, pieces, states);
      return launch(scope, {blocks, plan.threads}, softmax_online_results_kernel<Direction>,
                    tensors, direction, pieces, states);
    }
  }
}

template <class Direction, class Access>
void launch_columns(const OpScope& scope, const Tensors<Direction>& tensors,
                    const Direction& direction) {
  using Read = typename Direction::Read;
  using State = typename Direction::State;
  constexpr int kColumns = Access::template kColumns<Read>;
  const int64_t packs = divide_up(tensors.shape.outer * tensors.shape.inner, kColumns);
  const ColumnPlan plan = select_column_kernel(packs, tensors.shape.length,
                                               kColumns * static_cast<int>(sizeof(Read)),
                                               kColumnLines);
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
  constexpr int64_t kChunk = Chunk<typename Direction::Read>::kSize;
  bool wide = tensors.shape.inner % kChunk == 0;
  for (const SoftmaxOperand& operand : tensors.operand) {
    wide &= reinterpret_cast<uintptr_t>(operand.data) % 16 == 0;
    wide &= operand.length_stride % kChunk == 0;
    for (int d = 0; d < operand.outer.rank; ++d) wide &= operand.outer.stride[d] % kChunk == 0;
  }
  return wide ? launch_columns<Direction, WideAccess>(scope, tensors, direction)
              : launch_columns<Direction, ElementAccess>(scope, tensors, direction);
}

}  // namespace flashattn::cuda
