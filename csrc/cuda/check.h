// CUDA errors become exceptions that name the op and the problem. Nothing here synchronises.
#pragma once

#include <cuda_runtime_api.h>

namespace flashattn::cuda {

// Throws std::runtime_error: the op, what was attempted, CUDA's reason, and what to do about it.
[[noreturn]] void throw_error(const char* op, const char* attempt, cudaError_t error);

inline void check(const char* op, const char* attempt, cudaError_t error) {
  if (error != cudaSuccess) [[unlikely]] {
    cudaGetLastError();  // a failed call must not be found again by somebody else's check
    throw_error(op, attempt, error);
  }
}

}  // namespace flashattn::cuda

// FLASHATTN_CUDA_CHECK("softmax", cudaSetDevice(1))
#define FLASHATTN_CUDA_CHECK(op, call) ::flashattn::cuda::check((op), #call, (call))
