// dropout_mask: the attention ops' dropout decisions, written out.
#include "cpu/dropout_mask.h"

#include <torch/csrc/stable/library.h>

#include "core/dropout_mask_problem.h"
#include "cuda/dropout_mask.h"
#include "ops/checks.h"
#include "ops/devices.h"
#include "ops/tensors.h"

namespace flashattn::ops {
namespace {

Tensor dropout_mask(Tensor rng_state, int64_t batch, int64_t heads_q, int64_t len_q, int64_t len_k,
                    double dropout_p) {
  FLASHATTN_CHECK(rng_state.scalar_type() == ScalarType::Long, "rng_state", "dtype int64",
                  dtype_text(rng_state.scalar_type()));
  FLASHATTN_CHECK(rng_state.dim() == 1 && rng_state.size(0) == 2, "rng_state", "shape (2,)",
                  shape_text(rng_state));
  FLASHATTN_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p", "a probability in [0, 1]",
                  dropout_p);
  const struct {
    const char* name;
    int64_t size;
  } sizes[] = {{"batch", batch}, {"heads_q", heads_q}, {"len_q", len_q}, {"len_k", len_k}};
  for (const auto& [name, size] : sizes) FLASHATTN_CHECK(size >= 0, name, "a size >= 0", size);

  rng_state = torch::stable::contiguous(rng_state);
  Tensor mask = empty_contiguous({batch, heads_q, len_q, len_k}, ScalarType::Bool, rng_state);
  if (mask.numel() == 0) return mask;
  const Dropout dropout{static_cast<const int64_t*>(rng_state.const_data_ptr()),
                        Dropout::threshold_for(dropout_p)};
  const DropoutMaskProblem problem{dropout, batch, heads_q,
                                   len_q,   len_k, static_cast<bool*>(mask.mutable_data_ptr())};
  if (!rng_state.is_cuda()) {
    cpu::dropout_mask(problem);
  } else if constexpr (kWithCuda) {
    cuda::dropout_mask(problem, rng_state.get_device_index());
  } else {
    built_without_cuda("dropout_mask");
  }
  return mask;
}

}  // namespace
}  // namespace flashattn::ops

STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CPU, library) {
  library.impl("dropout_mask", TORCH_BOX(&flashattn::ops::dropout_mask));
}
STABLE_TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, library) {
  library.impl("dropout_mask", TORCH_BOX(&flashattn::ops::dropout_mask));
}
