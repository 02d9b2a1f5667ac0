// Step 2 of three: from dot products to probabilities and weights.
#pragma once

#include "core/online_softmax.h"
#include "cuda/naive/terms.cuh"

namespace flashattn::cuda::naive {

// Contiguous: (batch, heads_q, len_q, len_k), (batch, heads_q, len_q) and (batch, heads_q).
template <class Element>
struct SoftmaxArguments {
  AttentionProblem problem;
  // Dot products; lost afterwards. May be the memory of probs or of weights, since a thread writes
  // only what it has read.
  Accumulator<Element>* scores;
  Element* probs;
  Element* weights;  // null: the same as probs, or not asked for
  Accumulator<Element>* lse;
  // What a row's output is multiplied by, so that its weights, once rounded, sum up to what they
  // should; null: they are not rounded. (batch, heads_q, len_q)
  Accumulator<Element>* corrections;
  float* max_logits;  // null: not asked for
  bool wide;          // chunks are whole and aligned to 16 bytes
};

// The largest number so far; NaN is above everything. The order of the bit patterns is the order of
// the numbers once those of negative numbers are read backwards.
__device__ __forceinline__ void raise_to(float* address, float value) {
  if (value != value) value = bit_cast<float>(0x7fffffff);
  if (bit_cast<int>(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(address), bit_cast<int>(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), bit_cast<unsigned>(value));
  }
}

template <class Element>
__global__ void __launch_bounds__(kMostThreads)
    naive_softmax_kernel(const __grid_constant__ SoftmaxArguments<Element> arguments, Lanes lanes) {
  using Real = Accumulator<Element>;
  constexpr int kHeld = kHeldChunks<Real>;
  const AttentionProblem& p = arguments.problem;
  const RowPlace place(p, lanes.row());
  const ScoreTerms<Element> terms(p, place);
  const bool exists = place.index < p.sequences.count * p.heads_q * p.sequences.storage_q;
  const int64_t len_k = p.sequences.storage_k, columns = exists ? len_k : 0;
  const int64_t turn = int64_t{lanes.count()} * kHeld * kChunk;
  const bool held = len_k <= turn, wide = arguments.wide;
  Real* const scores = arguments.scores + place.index * len_k;
  Real x[kHeld][kChunk];

  // Calls body(chunk, its first column, how many columns it has) for the chunks of a turn.
  const auto for_each_chunk = [&](int64_t begin, const auto& body) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t first = begin + (int64_t{k} * lanes.count() + lanes.own()) * kChunk;
      const int64_t rest = columns - first;
      body(x[k], first, static_cast<int>(rest > kChunk ? kChunk : rest < 0 ? 0 : rest));
    }
  };
  const auto fetch = [&](Real(&chunk)[kChunk], int64_t first, int count) {
    if (!held && count > 0) load_chunk(scores + first, wide, count, chunk);
  };
  const auto keep = [&](const Real(&chunk)[kChunk], int64_t first, int count) {
    if (!held && count > 0) store_chunk(scores + first, wide, count, chunk);
  };

  // Scores and their maximum. A sink is one more score.
  Real max = kNegativeInfinity<Real>;
  for (int64_t begin = 0; begin < len_k; begin += turn) {
    for_each_chunk(begin, [&](Real(&chunk)[kChunk], int64_t first, int count) {
      if (count > 0 && place.sees(first)) {
        load_chunk(scores + first, wide, count, chunk);
        terms.apply(first, chunk);
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) chunk[i] = kNegativeInfinity<Real>;
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) max = larger(max, chunk[i]);
      keep(chunk, first, count);
    });
  }
  const Real max_score = join_row(max, lanes, [](Real a, Real b) { return larger(a, b); });
  OnlineSoftmax<Real> state{max_score};
  Real sink = kNegativeInfinity<Real>;
  if (p.sinks) sink = *p.sinks.as<const Real>().at(0, place.head);
  state.max = larger(max_score, sink);
  const Real reference = OnlineSoftmax<Real>::finite_or_zero(state.max);

  // Exponentials and their sum.
  Real sum = 0;
  for (int64_t begin = 0; begin < len_k; begin += turn) {
    for_each_chunk(begin, [&](Real(&chunk)[kChunk], int64_t first, int count) {
      fetch(chunk, first, count);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        chunk[i] = exponential<Element>(chunk[i] - reference);
        if (held || i < count) sum += chunk[i];
      }
      keep(chunk, first, count);
    });
  }
  state.sum = sum_of_row(sum, lanes);
  const Real max_logit = state.sum == state.sum ? max_score : state.sum;
  if (p.sinks) state.sum += exponential<Real>(sink - reference);
  if (exists && lanes.own() == 0) {
    arguments.lse[place.index] = state.log_sum_exp().high;
    if (arguments.max_logits) {
      raise_to(arguments.max_logits + place.batch * p.heads_q + place.head,
               static_cast<float>(max_logit));
    }
  }

  // Probabilities, and what dropout leaves of them.
  const Real inverse = state.inverse_sum();
  const Real keep_scale = static_cast<Real>(p.dropout.keep_scale());
  Real exact_sum = 0, rounded_sum = 0;
  DropoutStream stream{};
  if (p.dropout) stream = p.dropout.stream(place.batch, p.heads_q, place.head);
  for (int64_t begin = 0; begin < len_k; begin += turn) {
    for_each_chunk(begin, [&](Real(&chunk)[kChunk], int64_t first, int count) {
      fetch(chunk, first, count);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) chunk[i] *= inverse;
      const uint32_t kept = p.dropout ? keep_bits(stream, place.row, first) : 0xffu;
      if (count == 0) return;
      const int64_t offset = place.index * len_k + first;
      store_chunk(arguments.probs + offset, wide, count, chunk);
      if (p.dropout) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) chunk[i] *= (kept >> i) & 1u ? keep_scale : Real(0);
      }
      if (arguments.weights) store_chunk(arguments.weights + offset, wide, count, chunk);
      if constexpr (sizeof(Element) == 2) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (!held && i >= count) continue;
          exact_sum += chunk[i];
          rounded_sum += convert<Real>(convert<Element>(chunk[i]));
        }
      }
    });
  }
  if constexpr (sizeof(Element) == 2) {
    exact_sum = sum_of_row(exact_sum, lanes);
    rounded_sum = sum_of_row(rounded_sum, lanes);
    if (exists && lanes.own() == 0) {
      arguments.corrections[place.index] =
          rounded_sum == Real(0) ? Real(1) : exact_sum / rounded_sum;
    }
  }
}

}  // namespace flashattn::cuda::naive
