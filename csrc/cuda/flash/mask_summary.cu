#include "cuda/flash/mask_summary.h"
#include "cuda/launch.cuh"
#include "cuda/numeric.cuh"

namespace flashattn::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ bool is_hidden(bool visible) { return !visible; }
template <class Element>
__device__ __forceinline__ bool is_hidden(Element term) {
  return convert<Accumulator<Element>>(term) == kNegativeInfinity<Accumulator<Element>>;
}

// Blocks: (batch, heads, row cells, key cells) of the mask, slowest first. Every element is read
// once.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    flash_mask_summary_kernel(const __grid_constant__ MaskTensor mask, MaskSummary to,
                              bool chunked) {
  constexpr int kCell = MaskSummary::kCell;
  const auto view = mask.view.as<const Element>();
  int64_t block = blockIdx.x;
  const int64_t key = block % to.key_cells * kCell;
  block /= to.key_cells;
  const int64_t row = block % to.row_cells * kCell;
  block /= to.row_cells;
  const Element* const cell = view.at(block / view.size[1], block % view.size[1], row, key);
  const int rows = static_cast<int>(min(int64_t{kCell}, view.size[2] - row));
  const int keys = static_cast<int>(min(int64_t{kCell}, view.size[3] - key));
  bool visible = false, hidden = false;
  const auto look_at = [&](Element element) { (is_hidden(element) ? hidden : visible) = true; };
  if (chunked) {
    constexpr int kChunk = Chunk<Element>::kSize, kChunks = kCell / kChunk;
#pragma unroll
    for (int i = threadIdx.x; i < kCell * kChunks; i += kThreads) {
      const int r = i / kChunks, k = i % kChunks * kChunk;
      if (r >= rows || k >= keys) continue;
      const auto chunk = *reinterpret_cast<const Chunk<Element>*>(cell + r * view.stride[2] + k);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) look_at(chunk.element[e]);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < kCell * kCell; i += kThreads) {
      const int r = i / kCell, k = i % kCell;
      if (r < rows && k < keys) look_at(cell[r * view.stride[2] + k * view.stride[3]]);
    }
  }
  const uint32_t some_visible = __syncthreads_or(visible), some_hidden = __syncthreads_or(hidden);
  if (threadIdx.x == 0) {
    to.cells[blockIdx.x] = (some_visible ? MaskSummary::kSomeVisible : 0) |
                           (some_hidden ? MaskSummary::kSomeHidden : 0);
  }
}

template <class Element>
void summarise(const OpScope& scope, const MaskTensor& mask, bool chunked, const MaskSummary& to) {
  const int64_t blocks = MaskSummary::count(mask);
  if (blocks == 0) return;
  launch(scope, {blocks, kThreads}, flash_mask_summary_kernel<Element>, mask, to, chunked);
}

}  // namespace

void summarise_mask(const OpScope& scope, const MaskTensor& mask, bool chunked,
                    const MaskSummary& to) {
  switch (mask.dtype) {
    case DType::boolean: return summarise<bool>(scope, mask, chunked, to);
    case DType::float16: return summarise<float16>(scope, mask, chunked, to);
    case DType::bfloat16: return summarise<bfloat16>(scope, mask, chunked, to);
    case DType::float32: return summarise<float>(scope, mask, chunked, to);
    case DType::float64: return summarise<double>(scope, mask, chunked, to);
  }
}

}  // namespace flashattn::cuda
