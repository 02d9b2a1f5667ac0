#include "cuda/device.h"

#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/check.h"

namespace flashattn::cuda {
namespace {

constexpr int kMaxDevices = 64;

int attribute(const char* op, cudaDeviceAttr which, int device) {
  int value = 0;
  FLASHATTN_CUDA_CHECK(op, cudaDeviceGetAttribute(&value, which, device));
  return value;
}

DeviceProperties query(const char* op, int device) {
  const int major = attribute(op, cudaDevAttrComputeCapabilityMajor, device);
  const int max_cluster = major < 9 ? 1 : major < 12 ? 2 * kPortableCluster : kPortableCluster;
  return {major,
          attribute(op, cudaDevAttrComputeCapabilityMinor, device),
          attribute(op, cudaDevAttrMultiProcessorCount, device),
          attribute(op, cudaDevAttrMaxThreadsPerMultiProcessor, device),
          attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(op, cudaDevAttrL2CacheSize, device),
          max_cluster};
}

// Asked once per device: attributes never change.
const DeviceProperties& properties_of(const char* op, int device) {
  static std::once_flag asked[kMaxDevices];
  static DeviceProperties properties[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error(std::string("flashattn_ext::") + op + ": device index " +
                             std::to_string(device) + " is out of range");
  }
  std::call_once(asked[device], [&] { properties[device] = query(op, device); });
  return properties[device];
}

// torch's current stream. The symbol is in libtorch_cuda, which a CPU-only torch lacks and this
// library therefore does not link; a CUDA tensor exists, so the library is loaded by now.
cudaStream_t current_stream(const char* op, int device) {
  using GetStream = int (*)(int32_t device_index, void** stream);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device, &stream) != 0) {
    throw std::runtime_error(std::string("flashattn_ext::") + op +
                             ": cannot ask torch for its current CUDA stream: libtorch_cuda.so is "
                             "not loaded in this process. A torch with CUDA support is needed.");
  }
  return static_cast<cudaStream_t>(stream);
}

// A range of its own domain costs a few nanoseconds when no profiler listens.
nvtxDomainHandle_t nvtx_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("flashattn_ext");
  return domain;
}

void push_range(const char* op) {
  nvtxEventAttributes_t event = {};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = op;
  nvtxDomainRangePushEx(nvtx_domain(), &event);
}

}  // namespace

OpScope::OpScope(const char* op, int device)
    : op_(op), stream_(current_stream(op, device)), properties_(properties_of(op, device)) {
  int current = 0;
  FLASHATTN_CUDA_CHECK(op, cudaGetDevice(&current));
  if (current != device) {
    FLASHATTN_CUDA_CHECK(op, cudaSetDevice(device));
    previous_device_ = current;
  }
  push_range(op);
}

OpScope::~OpScope() {
  nvtxDomainRangePop(nvtx_domain());
  if (previous_device_ >= 0) cudaSetDevice(previous_device_);
}

}  // namespace flashattn::cuda
