// The dropout decisions of a whole attention problem, written out.
#pragma once

#include <cstdint>

#include "core/dropout.h"

namespace flashattn {

struct DropoutMaskProblem {
  Dropout dropout;
  int64_t batch, heads_q, len_q, len_k;
  bool* mask;  // (batch, heads_q, len_q, len_k) contiguous; true = kept
};

}  // namespace flashattn
