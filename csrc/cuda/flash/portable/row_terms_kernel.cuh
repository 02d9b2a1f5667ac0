// The row terms of backward, delta = sum(grad_out * out) - grad_lse, and sums over a head's rows.
#pragma once

#include "cuda/flash/portable/gradient_tiles.cuh"

namespace flashattn::cuda::portable {

inline constexpr int kRowTermRows = 64;  // of a block
inline constexpr int kRowTermWarps = 8;

template <class Real>
__device__ __forceinline__ Real warp_sum(Real value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The sum over a block, right in thread 0; `scratch` holds one value a warp.
template <int Warps, class Real>
__device__ __forceinline__ Real block_sum(Real value, Real* scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  Real sum = 0;
#pragma unroll
  for (int warp = 0; warp < Warps; ++warp) sum += scratch[warp];
  return sum;
}

// Blocks: (batch, heads_q, row tiles). A warp takes every kRowTermWarps-th row of a tile.
template <class Element>
__global__ void __launch_bounds__(32 * kRowTermWarps)
    flash_row_terms_kernel(const __grid_constant__ BackwardArguments a) {
  using Real = Accumulator<Element>;
  __shared__ Real scratch[kRowTermWarps];
  const AttentionProblem& p = a.problem;
  const int64_t part = blockIdx.x % a.row_parts, head = blockIdx.x / a.row_parts % p.heads_q;
  const int64_t batch = blockIdx.x / a.row_parts / p.heads_q;
  const Sequence sequence = p.sequences[batch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto grad_out = a.inputs.grad_out.as<const Element>();
  const auto out = a.inputs.out.as<const Element>();
  const auto out_low = a.inputs.out_low.as<const Element>();
  Real grad_sink = 0;
  for (int r = warp; r < kRowTermRows; r += kRowTermWarps) {
    const int64_t i = part * kRowTermRows + r;
    if (i >= sequence.len_q) break;
    const int64_t row = sequence.q_begin + i;
    const Real lse = *a.inputs.lse.as<const Real>().at(batch, head, row);
    Real delta = 0;
    if (lse != kNegativeInfinity<Real>) {
      const Element* left = grad_out.at(batch, head, row);
      const Element* right = out.at(batch, head, row);
      for (int c = lane; c < p.head_dim_v; c += 32) {
        delta +=
            convert<Real>(left[c * grad_out.stride[3]]) * convert<Real>(right[c * out.stride[3]]);
      }
      if (out_low) {
        const Element* low = out_low.at(batch, head, row);
        for (int c = lane; c < p.head_dim_v; c += 32) {
          delta += convert<Real>(left[c * grad_out.stride[3]]) *
                   convert<Real>(low[c * out_low.stride[3]]);
        }
      }
      delta = warp_sum(delta);
      if (a.inputs.grad_lse) delta -= *a.inputs.grad_lse.as<const Real>().at(batch, head, row);
      if (a.partial_sinks) {
        const auto low = a.inputs.lse_low.as<const Real>();
        const LogSumExp<Real> row_lse{lse, low ? *low.at(batch, head, row) : Real(0)};
        grad_sink -= probability(*p.sinks.as<const Real>().at(0, head), row_lse) * delta;
      }
    }
    if (lane == 0) *a.deltas.as<Real>().at(batch, head, row) = delta;
  }
  if (a.partial_sinks) {
    const Real sum = block_sum<kRowTermWarps>(lane == 0 ? grad_sink : Real(0), scratch);
    if (threadIdx.x == 0) {
      static_cast<Real*>(a.partial_sinks)[(batch * p.heads_q + head) * a.row_parts + part] = sum;
    }
  }
}

// Adds partial sums (batch, heads_q, parts) in order to `to` (batch | 1, heads_q). One thread a
// head; with `to` shared by the batch, it adds the batch too.
template <class Real>
__global__ void flash_add_partials_kernel(const Real* partials, UntypedView4 to, int64_t batch,
                                          int64_t heads, int64_t parts) {
  const int64_t head = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (head >= heads) return;
  const auto sums = to.as<Real>();
  for (int64_t b = 0; b < batch; ++b) {
    Real sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += partials[(b * heads + head) * parts + part];
    *sums.at(to.size[0] > 1 ? b : 0, head) += sum;
  }
}

}  // namespace flashattn::cuda::portable
