// The device an op runs on, for as long as the op's host code lasts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashattn::cuda {

struct DeviceProperties {
  int major, minor;  // compute capability
  int multiprocessors;
  int threads_per_multiprocessor;
  int shared_bytes_per_block;  // the most that a block may opt in to
  int64_t l2_bytes;
  int max_cluster;  // the most blocks in a cluster, if they fit; 1: no clusters
};

// Every device with clusters takes this many blocks in one; more only if it has room for them.
inline constexpr int kPortableCluster = 8;

// Makes `device` current and opens an NVTX range; both end with the scope. Host code of an op makes
// one and launches with it.
class OpScope {
 public:
  // `op` must be a string literal.
  OpScope(const char* op, int device);
  ~OpScope();
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

  const char* op() const { return op_; }
  cudaStream_t stream() const { return stream_; }  // torch's current stream of the device
  const DeviceProperties& device() const { return properties_; }

 private:
  const char* op_;
  int previous_device_ = -1;  // to be restored; -1: it was current already
  cudaStream_t stream_;
  const DeviceProperties& properties_;
};

}  // namespace flashattn::cuda
