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
  int cluster = 1;       // blocks per cluster; above 1 needs DeviceProperties::has_clusters()
};

template <class... Parameters, class... Arguments>
void launch(const OpScope& scope, const Grid& grid, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (grid.blocks > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error(std::string("flashattn_ext::") + scope.op() + ": the problem needs " +
                             std::to_string(grid.blocks) + " blocks, more than CUDA can launch");
  }
  if (grid.shared_bytes > 48 * 1024) {  // what a block may have without asking
    FLASHATTN_CUDA_CHECK(
        scope.op(), cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         grid.shared_bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = scope.stream();
  cudaLaunchAttribute cluster;
  if (grid.cluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  check(scope.op(), "the kernel launch", cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace flashattn::cuda
