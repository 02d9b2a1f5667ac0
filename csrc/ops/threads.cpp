// Lends torch's threads to the CPU kernels: they honour torch.set_num_threads, and one process has
// one pool.
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "cpu/parallel.h"

namespace flashattn::ops {
namespace {

void run_on_torch_threads(int64_t workers, cpu::ThreadHost::Work work, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, work, context));
}

int torch_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

const bool installed = [] {
  cpu::thread_host = {run_on_torch_threads, torch_threads};
  return true;
}();

}  // namespace
}  // namespace flashattn::ops
