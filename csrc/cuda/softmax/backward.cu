#include "cuda/softmax.h"
#include "cuda/softmax/launch.cuh"

namespace flashattn::cuda {

void softmax_backward(const SoftmaxBackwardProblem& problem, int device,
                      const Workspace& workspace) {
  const SoftmaxFormula formula{problem.kind};
  const OpScope scope(formula.is_log() ? "log_softmax_backward" : "softmax_backward", device);
  with_softmax_backward_types(
      problem.output.dtype, problem.grad_input.dtype, [&]<class In, class Out>(TypePair<In, Out>) {
        using Direction = Backward<In, Out>;
        const Tensors<Direction> tensors{problem.shape,
                                         {problem.grad_output, problem.output},
                                         static_cast<Out*>(problem.grad_input.data)};
        launch_direction(scope, tensors, Direction{formula}, workspace);
      });
}

}  // namespace flashattn::cuda
