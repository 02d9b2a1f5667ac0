// Compiled by test_house_rules.py where nvcc is found: every part of core/ that kernels call must
// be device code too. Nothing here runs.
#include "core/constants.h"
#include "core/divisor.h"
#include "core/dropout.h"
#include "core/dropout_mask_problem.h"
#include "core/dtype.h"
#include "core/high_product.h"
#include "core/mask.h"
#include "core/online_softmax.h"
#include "core/philox.h"
#include "core/problem.h"
#include "core/sequences.h"
#include "core/softmax_formula.h"
#include "core/softmax_gradient.h"
#include "core/softmax_problem.h"
#include "core/tensor_view.h"
#include "core/tile_schedule.h"

namespace flashattn {

template <class Element>
__global__ void use_core(AttentionProblem problem, ForwardOutputs outputs, Divisor divisor) {
  using Real = Accumulator<Element>;
  const auto query = problem.query.as<const Element>();
  const auto lse = outputs.lse.as<Real>();
  const Task task =
      TaskGrid{problem.sequences.count, problem.heads_q, 1}[divisor.divide(blockIdx.x).quotient];
  const Sequence sequence = problem.sequences[task.batch];
  const SequenceMask mask = problem.mask_rule.for_sequence(sequence.len_q, sequence.len_k);
  const DropoutStream stream = problem.dropout.stream(task.batch, problem.heads_q, task.head);
  const Softcap<Real> softcap{static_cast<Real>(problem.softcap)};

  for (int64_t row = threadIdx.x; row < sequence.len_q; row += blockDim.x) {
    OnlineSoftmax<Real> state, other;
    Real gradient = 0;
    const Range rows{row, row + 1};
    const Tiles tiles = aligned_tiles(mask.keys_for(rows), 16);
    for (int64_t tile = 0; tile < tiles.count(); ++tile) {
      const Range keys = tiles[tile];
      const bool needs_mask = !mask.all_visible(rows, keys) || mask.queries_for(keys).empty();
      for (int64_t col = keys.begin; col < keys.end; ++col) {
        if (needs_mask && !mask.visible(row, col)) continue;
        const Real x = convert<Real>(*query.at(task.batch, task.head, sequence.q_begin + row, 0));
        const Real score = softcap(x) + alibi_distance<Real>(row, mask.shift, col);
        (stream.keep(row, col) ? state : other).add(score);
        gradient += score_gradient(probability<Real>(score, state.log_sum_exp()),
                                   softcap.slope_at(score), Real(1), state.inverse_sum());
      }
    }
    state.merge(other);
    const auto joined = MergeWeights<Real>::of(state.log_sum_exp().high, other.log_sum_exp().low);
    *lse.at(task.batch, task.head, row) = joined.lse + gradient;
    *outputs.out.as<Element>().at(task.batch, problem.kv_head(task.head)) =
        convert<Element>(joined.weight_a);
  }
}

template <class Real>
__global__ void use_softmax(SoftmaxForwardProblem problem, DropoutStream stream, Real* result) {
  const SoftmaxFormula formula{problem.kind};
  const Real normaliser = formula.normaliser(Real(2));
  const Real probability = formula.value(Real(1), normaliser);
  const bool kept = dropout_block(stream, 0, 0).keep[threadIdx.x % kDropoutBlock];
  result[problem.input.outer.offset(threadIdx.x)] =
      kept ? formula.gradient(Real(1), probability, formula.summand(Real(1), probability))
           : static_cast<Real>(philox4x32<10>({{1, 2, 3, 4}}, {{5, 6}}).word[0]);
}

template __global__ void use_softmax<float>(SoftmaxForwardProblem, DropoutStream, float*);
template __global__ void use_softmax<double>(SoftmaxForwardProblem, DropoutStream, double*);
template __global__ void use_core<float16>(AttentionProblem, ForwardOutputs, Divisor);
template __global__ void use_core<bfloat16>(AttentionProblem, ForwardOutputs, Divisor);
template __global__ void use_core<float>(AttentionProblem, ForwardOutputs, Divisor);
template __global__ void use_core<double>(AttentionProblem, ForwardOutputs, Divisor);

}  // namespace flashattn
