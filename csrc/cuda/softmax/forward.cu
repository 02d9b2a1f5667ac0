#include "cuda/softmax.h"
#include "cuda/softmax/launch.cuh"

namespace flashattn::cuda {

void softmax_forward(const SoftmaxForwardProblem& problem, int device, const Workspace& workspace) {
  const SoftmaxFormula formula{problem.kind};
  const OpScope scope(formula.is_log() ? "log_softmax" : "softmax", device);
  with_softmax_forward_types(
      problem.input.dtype, problem.output.dtype, [&]<class In, class Out>(TypePair<In, Out>) {
        using Direction = Forward<In, Out>;
        const Tensors<Direction> tensors{
            problem.shape, {problem.input}, static_cast<Out*>(problem.output.data)};
        launch_direction(scope, tensors, Direction{formula}, workspace);
      });
}

}  // namespace flashattn::cuda
