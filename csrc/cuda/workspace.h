// Scratch memory of a kernel. It comes from the caller's allocator (torch's caching allocator), so
// that it is ordered with the stream and legal under CUDA-graph capture.
#pragma once

#include <cstdint>
#include <functional>

namespace flashattn::cuda {

// Returns device memory of that many bytes, aligned to 256, alive until the op returns.
using Workspace = std::function<void*(int64_t bytes)>;

}  // namespace flashattn::cuda
