#include "cuda/check.h"

#include <sstream>
#include <stdexcept>

namespace flashattn::cuda {
namespace {

std::string version_text(int version) {  // 13000 -> "13.0"
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The errors that say something about the installation, in terms of what to change.
std::string advice(cudaError_t error) {
  std::ostringstream text;
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion: {
      int driver = 0, runtime = 0;
      cudaDriverGetVersion(&driver);
      cudaRuntimeGetVersion(&runtime);
      text << " The NVIDIA driver supports CUDA " << version_text(driver)
           << ", and these kernels were built with CUDA " << version_text(runtime)
           << ": update the driver, or build with an older CUDA toolkit.";
      break;
    }
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction: {
      int device = 0, major = 0, minor = 0;
      cudaGetDevice(&device);
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      text << " This build has no code for GPU " << device << " (compute capability " << major
           << "." << minor << "): build again with FLASHATTN_EXT_CUDA_ARCHITECTURES=" << major
           << minor << " (8.0 or newer is needed).";
      break;
    }
    case cudaErrorNoDevice: text << " No NVIDIA GPU is visible to this process."; break;
    default: break;
  }
  return text.str();
}

}  // namespace

void throw_error(const char* op, const char* attempt, cudaError_t error) {
  std::ostringstream text;
  text << "flashattn_ext::" << op << ": " << attempt << " failed: " << cudaGetErrorString(error)
       << " (" << cudaGetErrorName(error) << ")." << advice(error);
  throw std::runtime_error(text.str());
}

}  // namespace flashattn::cuda
