#include "cuda/flash/portable/backward_launch.cuh"

template void flashattn::cuda::portable::launch_backward<flashattn::bfloat16>(
    const OpScope&, const BackwardArguments&, const Workspace&);
