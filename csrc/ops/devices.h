// Which device a call runs on. CUDA kernels are optional at build time: without them the same ops
// are registered for CUDA tensors, and say what is missing.
#pragma once

#include "ops/checks.h"

namespace flashattn::ops {

#if defined(FLASHATTN_HAS_CUDA)
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

// Use: if constexpr (kWithCuda) cuda::op(...); else built_without_cuda("op");
[[noreturn]] inline void built_without_cuda(const char* op) {
  STD_TORCH_CHECK(false, "flashattn_ext::", op,
                  ": got a CUDA tensor, but this build of flashattn_ext has no CUDA kernels. "
                  "Install the CUDA toolkit (nvcc) and build again with FLASHATTN_EXT_CUDA=1, or "
                  "move the tensor to the CPU.");
}

}  // namespace flashattn::ops
