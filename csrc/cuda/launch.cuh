// How kernels are launched: one-dimensional grids (y and z end at 65535), 64-bit block counts, the
// scope's stream, and an error that names the op.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/check.h"
#include "cuda/device.h"

namespace flashattn::cuda {

struct Grid {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;  // dynamic
  int cluster = 1;       // blocks per cluster, at most DeviceProperties::max_cluster
};

// The exponent of a power of two.
inline int exponent_of(int power) {
  int exponent = 0;
  while ((1 << exponent) < power) ++exponent;
  return exponent;
}

// A launch configuration; `attribute` must live as long.
inline cudaLaunchConfig_t config_of(const OpScope& scope, const Grid& grid,
                                    cudaLaunchAttribute& attribute) {
  if (grid.blocks > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error(std::string("flashattn_ext::") + scope.op() + ": the problem needs " +
                             std::to_string(grid.blocks) + " blocks, more than CUDA can launch");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = scope.stream();
  if (grid.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return config;
}

// Whether the device has room for a cluster of more than kPortableCluster blocks at all.
template <class... Parameters>
bool fits_cluster(const OpScope& scope, const Grid& grid, void (*kernel)(Parameters...)) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(scope, grid, attribute);
  int clusters = 0;
  const bool known = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                          1) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
  if (!known) cudaGetLastError();  // the answer is no, not an error
  return known && clusters > 0;
}

template <class... Parameters, class... Arguments>
void launch(const OpScope& scope, const Grid& grid, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (grid.shared_bytes > 48 * 1024) {  // what a block may have without asking
    FLASHATTN_CUDA_CHECK(scope.op(),
                         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              grid.shared_bytes));
  }
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(scope, grid, attribute);
  check(scope.op(), "the kernel launch", cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace flashattn::cuda
