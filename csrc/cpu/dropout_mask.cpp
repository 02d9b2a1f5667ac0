#include "cpu/dropout_mask.h"

#include <algorithm>

#include "core/tile_schedule.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {

void dropout_mask(const DropoutMaskProblem& problem) {
  constexpr int64_t kTaskElements = 1 << 15;
  const Tiles rows{{0, problem.len_q}, std::max<int64_t>(1, kTaskElements / problem.len_k)};
  const TaskGrid tasks{problem.batch, problem.heads_q, rows.count()};
  parallel_for_each(tasks.count(), [&](int64_t index) {
    const Task task = tasks[index];
    const DropoutStream stream = problem.dropout.stream(task.batch, problem.heads_q, task.head);
    const Range range = rows[task.part];
    for (int64_t row = range.begin; row < range.end; ++row) {
      bool* out =
          problem.mask +
          ((task.batch * problem.heads_q + task.head) * problem.len_q + row) * problem.len_k;
      for (int64_t begin = 0; begin < problem.len_k; begin += kDropoutBlock) {
        const DropoutBlock block = dropout_block(stream, row, begin / kDropoutBlock);
        const int64_t width = std::min<int64_t>(kDropoutBlock, problem.len_k - begin);
        std::copy_n(block.keep, width, out + begin);
      }
    }
  });
}

}  // namespace flashattn::cpu
