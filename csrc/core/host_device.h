// Marks functions that both the CPU kernels and the CUDA kernels call.
#pragma once

#if defined(__CUDACC__)
#define FLASHATTN_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Files compiled for different instruction sets must not share an out-of-line copy.
#define FLASHATTN_HD inline __attribute__((always_inline))
#else
#define FLASHATTN_HD inline
#endif
