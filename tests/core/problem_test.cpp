#include "core/problem.h"

#include <gtest/gtest.h>

#include "core/constants.h"

namespace flashattn {
namespace {

TEST(AttentionProblem, QueryHeadsShareKeyHeadsInRuns) {
  AttentionProblem problem;
  problem.heads_q = 6;
  problem.heads_kv = 2;
  EXPECT_EQ(problem.group_size(), 3);
  const int64_t expected[] = {0, 0, 0, 1, 1, 1};
  for (int64_t head = 0; head < 6; ++head) EXPECT_EQ(problem.kv_head(head), expected[head]);
}

TEST(AttentionProblem, OneKeyHeadPerQueryHeadAndOneForAll) {
  AttentionProblem problem;
  for (const int64_t heads_kv : {1, 5}) {
    problem.heads_q = 5;
    problem.heads_kv = heads_kv;
    for (int64_t head = 0; head < 5; ++head) {
      EXPECT_EQ(problem.kv_head(head), heads_kv == 1 ? 0 : head);
    }
  }
}

TEST(AttentionProblem, NoHeadsDivideByNothing) {
  EXPECT_EQ(AttentionProblem{}.group_size(), 1);
  EXPECT_EQ(AttentionProblem{}.kv_head(0), 0);
}

TEST(AttentionProblem, NothingIsPresentUnlessGiven) {
  const AttentionProblem problem;
  EXPECT_FALSE(static_cast<bool>(problem.attn_mask));
  EXPECT_FALSE(static_cast<bool>(problem.alibi_slopes));
  EXPECT_FALSE(static_cast<bool>(problem.sinks));
  EXPECT_FALSE(static_cast<bool>(problem.dropout));
  EXPECT_FALSE(problem.sequences.packed());
  EXPECT_FALSE(problem.mask_rule.causal);
  EXPECT_EQ(problem.mask_rule.window_left, kUnlimited);
  EXPECT_EQ(problem.mask_rule.window_right, kUnlimited);
}

}  // namespace
}  // namespace flashattn
