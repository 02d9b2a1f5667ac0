#include "cuda/naive/products.h"

#include <dlfcn.h>
#include <library_types.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/check.h"
#include "cuda/naive/matrices.h"

namespace flashattn::cuda::naive {
namespace {

// What is used of cublas_api.h, which not every CUDA toolkit has. These never change.
constexpr int kNoTranspose = 0, kTranspose = 1;         // cublasOperation_t
constexpr int kComputeFloat = 68, kComputeDouble = 70;  // cublasComputeType_t: of IEEE numbers
constexpr int kDefaultAlgorithm = -1;                   // cublasGemmAlgo_t
// cublasMath_t: no TF32, and no 16-bit partial sums.
constexpr int kDefaultMath = 0, kNoReducedPrecision = 16;

using Gemm = int (*)(void* handle, int transpose_a, int transpose_b, int64_t m, int64_t n,
                     int64_t k, const void* alpha, const void* a, cudaDataType a_type,
                     int64_t a_leading, long long a_stride, const void* b, cudaDataType b_type,
                     int64_t b_leading, long long b_stride, const void* beta, void* c,
                     cudaDataType c_type, int64_t c_leading, long long c_stride, int64_t count,
                     int compute_type, int algorithm);

// torch's library is loaded, since a CUDA tensor exists, and it has loaded cuBLAS.
struct Library {
  int (*handle)(void** handle) = nullptr;  // torch's
  Gemm gemm = nullptr;
  int (*get_math_mode)(void* handle, int* mode) = nullptr;
  int (*set_math_mode)(void* handle, int mode) = nullptr;

  Library() {
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(torch, name));
    };
    find(handle, "torch_get_current_cuda_blas_handle");
    find(gemm, "cublasGemmStridedBatchedEx_64");
    find(get_math_mode, "cublasGetMathMode");
    find(set_math_mode, "cublasSetMathMode");
  }
  bool complete() const { return handle && gemm && get_math_mode && set_math_mode; }
};

const Library& library() {
  static const Library found;
  return found;
}

void check_status(const OpScope& scope, const char* attempt, int status) {
  if (status == 0) [[likely]]
    return;
  throw std::runtime_error(std::string("flashattn_ext::") + scope.op() + ": " + attempt +
                           " failed: cuBLAS status " + std::to_string(status));
}

cudaDataType cuda_type(DType dtype) {
  switch (dtype) {
    case DType::float16: return CUDA_R_16F;
    case DType::bfloat16: return CUDA_R_16BF;
    case DType::float64: return CUDA_R_64F;
    default: return CUDA_R_32F;
  }
}

int element_size(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

Matrices transposed_matrices(const Matrices& m) { return {transposed(m.view), m.dtype}; }

}  // namespace

Products::Products(const OpScope& scope) : scope_(scope) {
  if (!library().complete()) {
    throw std::runtime_error(std::string("flashattn_ext::") + scope.op() +
                             ": cannot find cuBLAS through libtorch_cuda.so. A torch >= 2.11 with "
                             "CUDA support, linked with a shared cuBLAS >= 12, is needed.");
  }
  check_status(scope, "asking torch for its cuBLAS handle", library().handle(&handle_));
  check_status(scope, "cublasGetMathMode", library().get_math_mode(handle_, &math_mode_));
  check_status(scope, "cublasSetMathMode",
               library().set_math_mode(handle_, kDefaultMath | kNoReducedPrecision));
}

Products::~Products() { library().set_math_mode(handle_, math_mode_); }

void Products::multiply(const Matrices& a, const Matrices& b, const Matrices& c) const {
  if (elements_of(c.view) == 0) return;
  const int64_t depth = a.view.size[3];
  if (depth == 0 || elements_of(a.view) == 0) {
    FLASHATTN_CUDA_CHECK(
        scope_.op(), cudaMemsetAsync(c.view.data, 0, elements_of(c.view) * element_size(c.dtype),
                                     scope_.stream()));
    return;
  }
  const auto a_layout = layout_of(a.view), b_layout = layout_of(b.view);
  const auto c_layout = layout_of(c.view);
  if (!c_layout->row_major) {
    return multiply(transposed_matrices(b), transposed_matrices(a), transposed_matrices(c));
  }

  // A BLAS counts along columns: it is told that c transposed is b transposed times a transposed.
  const bool is_double = c.dtype == DType::float64;
  const float one = 1, zero = 0;
  const double one_double = 1, zero_double = 0;
  const void* alpha = is_double ? static_cast<const void*>(&one_double) : &one;
  const void* beta = is_double ? static_cast<const void*>(&zero_double) : &zero;
  const auto operation = [](const MatrixLayout& layout) {
    return layout.row_major ? kNoTranspose : kTranspose;
  };
  const MatrixRuns runs = runs_of(a.view, b.view, c.view);
  const auto at = [&](const Matrices& m, int64_t run, int64_t first) {
    const int64_t offset = run * m.view.stride[runs.outer] + first * m.view.stride[runs.inner];
    return static_cast<char*>(m.view.data) + offset * element_size(m.dtype);
  };
  constexpr int64_t kMostMatrices = 65535;  // of a call, whatever cuBLAS puts into a grid's z
  for (int64_t run = 0; run < runs.runs; ++run) {
    for (int64_t first = 0; first < runs.count; first += kMostMatrices) {
      check_status(
          scope_, "a matrix product",
          library().gemm(handle_, operation(*b_layout), operation(*a_layout), c.view.size[3],
                         c.view.size[2], depth, alpha, at(b, run, first), cuda_type(b.dtype),
                         b_layout->leading, b.view.stride[runs.inner], at(a, run, first),
                         cuda_type(a.dtype), a_layout->leading, a.view.stride[runs.inner], beta,
                         at(c, run, first), cuda_type(c.dtype), c_layout->leading,
                         c.view.stride[runs.inner], std::min(kMostMatrices, runs.count - first),
                         is_double ? kComputeDouble : kComputeFloat, kDefaultAlgorithm));
    }
  }
}

}  // namespace flashattn::cuda::naive
