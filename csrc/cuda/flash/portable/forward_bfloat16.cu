#include "cuda/flash/portable/forward_launch.cuh"

template void flashattn::cuda::portable::launch_forward<flashattn::bfloat16>(const OpScope&,
                                                             const ForwardArguments&,
                                                             const Workspace&);
