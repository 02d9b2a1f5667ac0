#include "cpu/dropout_mask.h"

#include <gtest/gtest.h>

#include "tensors.h"

namespace flashattn::cpu {
namespace {

TEST(DropoutMask, WritesEachDecisionAndNothingElse) {
  const int64_t rng_state[2] = {99, -4};
  for (const int64_t len_q : {1, 3, 70}) {
    for (const int64_t len_k : {1, 31, 32, 33, 500, 40000}) {
      if (len_q * len_k > 100000) continue;
      const Tensor mask(DType::boolean, {2, 3, len_q, len_k});
      const Dropout dropout{rng_state, Dropout::threshold_for(0.4)};
      dropout_mask({dropout, 2, 3, len_q, len_k, static_cast<bool*>(mask.view().data)});
      mask.for_each([&](Index4 at) {
        const DropoutStream stream = dropout.stream(at[0], 3, at[1]);
        ASSERT_EQ(mask.get(at), stream.keep(at[2], at[3])) << at[2] << ", " << at[3];
      });
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
