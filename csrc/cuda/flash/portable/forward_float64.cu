#include "cuda/flash/portable/forward_launch.cuh"

template void flashattn::cuda::portable::launch_forward<double>(const OpScope&,
                                                             const ForwardArguments&,
                                                             const Workspace&);
