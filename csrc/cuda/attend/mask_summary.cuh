// What each cell of 64 x 64 elements of attn_mask holds, found before the kernels that skip by it:
// where nothing is visible they load nothing.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/tile_schedule.h"

namespace flashattn::cuda {

struct MaskSummary {
  static constexpr int kCell = 64;
  enum : uint32_t { kSomeVisible = 1, kSomeHidden = 2 };

  uint8_t* cells = nullptr;  // (batch | 1, heads_q | 1, row_cells, key_cells); null without a mask
  int64_t batch_stride = 0, head_stride = 0;
  int row_cells = 0, key_cells = 0;

  MaskSummary() = default;
  explicit MaskSummary(const MaskTensor& mask)
      : row_cells(static_cast<int>(divide_up(mask.view.size[2], kCell))),
        key_cells(static_cast<int>(divide_up(mask.view.size[3], kCell))) {
    const int64_t plane = int64_t{row_cells} * key_cells;
    head_stride = mask.view.size[1] > 1 ? plane : 0;
    batch_stride = mask.view.size[0] > 1 ? mask.view.size[1] * plane : 0;
  }
  static int64_t count(const MaskTensor& mask) {
    const MaskSummary summary(mask);
    return mask.view.size[0] * mask.view.size[1] * summary.row_cells * summary.key_cells;
  }

#if defined(__CUDACC__)
  // What the cells hold that the tile from (row, key) on has a share of.
  template <int Rows, int Keys>
  __device__ __forceinline__ uint32_t of_tile(int batch, int head, int row, int key) const {
    if (!cells) return kSomeVisible;
    const uint8_t* plane = cells + batch * batch_stride + head * head_stride;
    uint32_t found = 0;
#pragma unroll
    for (int r = 0; r < Rows; r += kCell) {
      const int row_cell = min((row + r) / kCell, row_cells - 1);
#pragma unroll
      for (int k = 0; k < Keys; k += kCell) {
        const int key_cell = min((key + k) / kCell, key_cells - 1);
        found |= __ldg(plane + static_cast<int64_t>(row_cell) * key_cells + key_cell);
      }
    }
    return found;
  }
#endif
};

}  // namespace flashattn::cuda
