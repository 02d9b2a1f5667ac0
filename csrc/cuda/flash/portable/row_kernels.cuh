// The kernels before and after the backward kernel: the numbers of every query row that it needs,
// and grad_query of the sums that it left.
#pragma once

#include "cuda/attend/softmax_step.cuh"
#include "cuda/flash/arguments.h"
#include "cuda/flash/portable/tiles.cuh"
#include "cuda/numeric.cuh"

namespace flashattn::cuda::portable {

inline constexpr int kRowTermWarps = 8;
inline constexpr int kLanesPerRow = 8;

// The sum of two rows' products that `lane`, one of kLanesPerRow, has a share of.
template <class Element>
__device__ __forceinline__ Accumulator<Element> dot(const Element* a, int64_t stride_a,
                                                    const Element* b, int64_t stride_b, int columns,
                                                    bool chunked, int lane) {
  using Real = Accumulator<Element>;
  constexpr int kChunk = Chunk<Element>::kSize;
  Real sum = 0;
  if (chunked) {
#pragma unroll 2
    for (int c = lane * kChunk; c < columns; c += kLanesPerRow * kChunk) {
      Real left[kChunk], right[kChunk];
      widen(*reinterpret_cast<const Chunk<Element>*>(a + c), left);
      widen(*reinterpret_cast<const Chunk<Element>*>(b + c), right);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum += left[i] * right[i];
    }
  } else {
    // The same terms in the same order: layouts do not change results.
    for (int c = lane * kChunk; c < columns; c += kLanesPerRow * kChunk) {
      for (int i = c; i < min(c + kChunk, columns); ++i) {
        sum += convert<Real>(a[i * stride_a]) * convert<Real>(b[i * stride_b]);
      }
    }
  }
  return sum;
}

// lse as the scores want it, and delta = sum(grad_out * out) - grad_lse, by padded row; a part of
// the sinks' gradient. Rows that saw no key, and those that pad a tile, get probability 0
// everywhere.
// Blocks: (batch, heads_q, tiles of kPaddedRows rows), slowest first.
template <class Element, class Terms>
__global__ void __launch_bounds__(32 * kRowTermWarps)
    flash_row_terms_kernel(const __grid_constant__ BackwardArguments a) {
  using Real = Accumulator<Element>;
  __shared__ Real sinks[kRowTermWarps];
  const AttentionProblem& p = a.problem;
  const Divisor::Result part_of = a.row_parts.divide(blockIdx.x);
  const Divisor::Result head_of = a.heads.divide(part_of.quotient);
  const int part = part_of.rest, head = head_of.rest, batch = head_of.quotient;
  const Sequence sequence = p.sequences[batch];
  if (part * kPaddedRows >= sequence.len_q && !a.partial_sinks) return;
  const int lane = threadIdx.x % kLanesPerRow;
  const unsigned row_lanes = 0xffu << (threadIdx.x % 32 - lane);
  const auto grad_out = a.inputs.grad_out.as<const Element>();
  const auto out = a.inputs.out.as<const Element>();
  const auto out_low = a.inputs.out_low.as<const Element>();
  const auto lse_low = a.inputs.lse_low.as<const Real>();
  const int columns = static_cast<int>(p.head_dim_v);
  Real grad_sink = 0;
#pragma unroll
  for (int r = threadIdx.x / kLanesPerRow; r < kPaddedRows;
       r += 32 * kRowTermWarps / kLanesPerRow) {
    const int i = part * kPaddedRows + r;
    LogSumExp<Real> split{std::numeric_limits<Real>::infinity(), 0};
    Real delta = 0;
    if (i < sequence.len_q) {
      const int64_t row = sequence.q_begin + i;
      const LogSumExp<Real> lse{*a.inputs.lse.as<const Real>().at(batch, head, row),
                                lse_low ? *lse_low.at(batch, head, row) : Real(0)};
      if (lse.high != kNegativeInfinity<Real>) {
        split = Terms(p).split(lse);
        const Element* left = grad_out.at(batch, head, row);
        const bool chunked = a.chunked.grad_out && a.chunked.out;
        delta = dot(left, grad_out.stride[3], out.at(batch, head, row), out.stride[3], columns,
                    chunked, lane);
        if (out_low) {
          delta += dot(left, grad_out.stride[3], out_low.at(batch, head, row), out_low.stride[3],
                       columns, chunked, lane);
        }
#pragma unroll
        for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2) {
          delta += __shfl_xor_sync(row_lanes, delta, distance);
        }
        if (a.inputs.grad_lse) delta -= *a.inputs.grad_lse.as<const Real>().at(batch, head, row);
        if (a.partial_sinks && lane == 0) {
          grad_sink -= probability(*p.sinks.as<const Real>().at(0, head), lse) * delta;
        }
      }
    }
    if (lane == 0 && part * kPaddedRows < sequence.len_q) {
      const int64_t padded = a.padded.begin(p, sequence, batch, head) + i;
      static_cast<Real*>(a.lse_high)[padded] = split.high;
      static_cast<Real*>(a.lse_low)[padded] = split.low;
      static_cast<Real*>(a.deltas)[padded] = delta;
    }
  }
  if (a.partial_sinks) {
    grad_sink = warp_sum(grad_sink);
    if (threadIdx.x % 32 == 0) sinks[threadIdx.x / 32] = grad_sink;
    __syncthreads();
    if (threadIdx.x == 0) {
      Real sum = 0;
      for (int warp = 0; warp < kRowTermWarps; ++warp) sum += sinks[warp];
      static_cast<Real*>(a.partial_sinks)[blockIdx.x] = sum;
    }
  }
}

// Adds partial sums (batch, heads_q, parts) in order to `to` (1, heads_q). One thread a head.
template <class Real>
__global__ void flash_add_sinks_kernel(const Real* partials, UntypedView4 to, int batch, int heads,
                                       int parts) {
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= heads) return;
  Real sum = 0;
  for (int b = 0; b < batch; ++b) {
    for (int part = 0; part < parts; ++part) {
      sum += partials[(static_cast<int64_t>(b) * heads + head) * parts + part];
    }
  }
  *to.as<Real>().at(0, head) = sum;
}

// grad_query of the backward kernel's sums, which lie in the order of its accumulators.
// Blocks: (batch, heads_q, row tiles), slowest first. A warp takes a 16 x 8 fragment at a time.
template <class Tiles>
__global__ void __launch_bounds__(256)
    flash_query_gradient_kernel(const __grid_constant__ BackwardArguments a) {
  using Tile = DeviceTile<Tiles>;
  using Element = typename Tile::Element;
  using Real = typename Tile::Real;
  const AttentionProblem& p = a.problem;
  const Divisor::Result part_of = a.row_parts.divide(blockIdx.x);
  const Divisor::Result head_of = a.heads.divide(part_of.quotient);
  const int part = part_of.rest, head = head_of.rest, batch = head_of.quotient;
  const Sequence sequence = p.sequences[batch];
  const int row = part * Tile::kRows, rows = static_cast<int>(sequence.len_q) - row;
  if (rows <= 0) return;
  constexpr int kFragmentColumns = Tile::kSlice / 8;
  constexpr int kFragments = Tile::kRows / 16 * kFragmentColumns;
  const int width = a.slices.value() * Tile::kSlice, head_dim = static_cast<int>(p.head_dim);
  const Real* const sums = static_cast<const Real*>(a.grad_query) +
                           (a.padded.begin(p, sequence, batch, head) + row) * width;
  const auto to = a.outputs.grad_query.as<Element>();
  Element* const first = to.at(batch, head, sequence.q_begin + row);
  const Real scale = static_cast<Real>(p.scale);
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = threadIdx.x / 32; i < a.slices.value() * kFragments; i += 256 / 32) {
    const int slice = i / kFragments, fragment = i % kFragments;
    const int at_row = fragment / kFragmentColumns * 16 + lane / 4;
    const int column = slice * Tile::kSlice + fragment % kFragmentColumns * 8 + 2 * (lane % 4);
    struct alignas(16) Quad {
      Real value[4];
    };
    const Quad quad = *reinterpret_cast<const Quad*>(sums + (i * 32 + lane) * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (at_row + 8 * half >= rows || column >= head_dim) continue;
      struct alignas(2 * sizeof(Element)) Pair {
        Element element[2];
      } pair;
      pair.element[0] = convert<Element>(quad.value[2 * half] * scale);
      pair.element[1] = convert<Element>(quad.value[2 * half + 1] * scale);
      Element* const at = first + (at_row + 8 * half) * to.stride[2] + column * to.stride[3];
      if (a.chunked.grad_query) {
        *reinterpret_cast<Pair*>(at) = pair;
      } else {
        at[0] = pair.element[0];
        if (column + 1 < head_dim) at[to.stride[3]] = pair.element[1];
      }
    }
  }
}

}  // namespace flashattn::cuda::portable
