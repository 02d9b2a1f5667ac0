// Step 2 backward: from d loss / d weight to d loss / d dot product, from saved probabilities.
#pragma once

#include "core/online_softmax.h"
#include "cuda/naive/terms.cuh"

namespace flashattn::cuda::naive {

// Contiguous (batch, heads_q, len_q, len_k), and (batch, heads_q, len_q) where named row_*.
template <class Element>
struct GradientArguments {
  using Real = Accumulator<Element>;

  AttentionProblem problem;
  UntypedView4 lse, grad_lse;  // (batch, heads_q, len_q, 1); grad_lse may be absent
  const Element* probs;
  const Element* grad_weights;                // null: none
  const Real* dots;                           // dot products, with a softcap; else null
  const Real* grads;                          // grad_out * value^T
  Element* grad_dots;                         // may be the memory of grads
  Element* weights;                           // with dropout; else null
  Real *grad_scores, *row_alibi, *row_sinks;  // null: not asked for
  bool wide;                                  // chunks are whole and aligned to 16 bytes
};

template <class Element>
__global__ void __launch_bounds__(kMostThreads)
    naive_gradient_kernel(const __grid_constant__ GradientArguments<Element> arguments,
                          Lanes lanes) {
  using Real = Accumulator<Element>;
  constexpr int kHeld = kHeldChunks<Real>;
  const AttentionProblem& p = arguments.problem;
  RowPlace place(p, lanes.row());
  const bool exists = place.index < p.sequences.count * p.heads_q * p.sequences.storage_q;
  const int64_t len_k = p.sequences.storage_k, columns = exists ? len_k : 0;
  const int64_t turn = int64_t{lanes.count()} * kHeld * kChunk;
  const bool held = len_k <= turn, wide = arguments.wide;

  Real lse = kNegativeInfinity<Real>;
  if (exists) lse = *arguments.lse.template as<const Real>().at(place.batch, place.head, place.row);
  if (lse == kNegativeInfinity<Real>) place.seen = {0, 0};
  const ScoreTerms<Element> terms(p, place);
  const Real keep_scale = static_cast<Real>(p.dropout.keep_scale());
  DropoutStream stream{};
  if (p.dropout) stream = p.dropout.stream(place.batch, p.heads_q, place.head);

  // What a thread knows of a chunk.
  Real probs[kHeld][kChunk], grads[kHeld][kChunk];
  uint32_t kept[kHeld] = {};
  const auto first_of = [&](int64_t begin, int k) {
    return begin + (int64_t{k} * lanes.count() + lanes.own()) * kChunk;
  };
  const auto count_of = [&](int64_t first) {
    const int64_t rest = columns - first;
    return static_cast<int>(rest > kChunk ? kChunk : rest < 0 ? 0 : rest);
  };
  const auto factor = [&](int k, int i) {
    return !p.dropout ? Real(1) : (kept[k] >> i) & 1u ? keep_scale : Real(0);
  };
  const auto load = [&](int64_t begin) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t first = first_of(begin, k), offset = place.index * len_k + first;
      const int count = count_of(first);
      kept[k] = p.dropout ? keep_bits(stream, place.row, first) : 0xffu;
      if (count == 0 || !place.sees(first)) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) probs[k][i] = grads[k][i] = 0;
        continue;
      }
      load_chunk(arguments.probs + offset, wide, count, probs[k]);
      load_chunk(arguments.grads + offset, wide, count, grads[k]);
      if (arguments.grad_weights) {
        Real more[kChunk];
        load_chunk(arguments.grad_weights + offset, wide, count, more);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) grads[k][i] += more[i];
      }
      // What is hidden is not 0 times something: the product there may be of anything.
      const int seen_begin = place.begin_in(first), seen_end = place.end_in(first);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i < seen_begin || i >= seen_end) probs[k][i] = grads[k][i] = 0;
      }
    }
  };
  Real delta = 0, alibi = 0;
  const auto add_to_delta = [&] {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) delta += probs[k][i] * factor(k, i) * grads[k][i];
    }
  };
  const auto store = [&](int64_t begin) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t first = first_of(begin, k), offset = place.index * len_k + first;
      const int count = count_of(first);
      if (count == 0) continue;
      const int seen_begin = place.begin_in(first), seen_end = place.end_in(first);
      const auto seen = [&](int i) { return i >= seen_begin && i < seen_end; };
      Real result[kChunk];
      if (arguments.weights) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) result[i] = probs[k][i] * factor(k, i);
        store_chunk(arguments.weights + offset, wide, count, result);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const Real grad = score_gradient(probs[k][i], grads[k][i], factor(k, i), delta);
        result[i] = seen(i) ? grad : Real(0);
      }
      if (arguments.grad_scores) store_chunk(arguments.grad_scores + offset, wide, count, result);
      if (arguments.row_alibi) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) alibi += result[i] * terms.distance(first + i);
      }
      if (arguments.dots && place.sees(first)) {
        Real dots[kChunk];
        load_chunk(arguments.dots + offset, wide, count, dots);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          result[i] = seen(i) ? result[i] * terms.slope_at(dots[i]) : Real(0);
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) result[i] *= terms.scale();
      }
      store_chunk(arguments.grad_dots + offset, wide, count, result);
    }
  };

  // Twice along the row: for delta, then for what follows from it. (A loop, so that `load`, which
  // is long, is there once.)
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t begin = 0; begin < len_k; begin += turn) {
      if (pass == 0 || !held) load(begin);
      if (pass == 0) {
        add_to_delta();
      } else {
        store(begin);
      }
    }
    if (pass == 0) {
      delta = sum_of_row(delta, lanes);
      if (exists && arguments.grad_lse) {
        delta -=
            *arguments.grad_lse.template as<const Real>().at(place.batch, place.head, place.row);
      }
    }
  }
  if (arguments.row_alibi) {
    alibi = sum_of_row(alibi, lanes);
    if (exists && lanes.own() == 0) arguments.row_alibi[place.index] = alibi;
  }
  if (arguments.row_sinks && exists && lanes.own() == 0) {
    const Real sink = *p.sinks.as<const Real>().at(0, place.head);
    arguments.row_sinks[place.index] = -probability(sink, LogSumExp<Real>{lse, Real(0)}) * delta;
  }
}

}  // namespace flashattn::cuda::naive
