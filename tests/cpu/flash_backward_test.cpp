#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "attention_formula.h"
#include "cpu/attention.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {
namespace {

// Which of query, key, value, mask, alibi and sinks get a gradient.
using Wanted = unsigned;
constexpr Wanted kAll = 63;

struct Gradients {
  Tensor query, key, value, mask, alibi, sinks;

  Gradients(const AttentionCase& c, Wanted wanted) {
    const Options& o = c.o;
    const DType real = accumulator_of(o.dtype);
    const auto zeros = [](Tensor tensor) {
      tensor.fill(0);
      return tensor;
    };
    if (wanted & 1) query = zeros(c.rows(o.dtype, o.heads_q, c.storage_q, o.head_dim));
    if (wanted & 2) key = zeros(c.rows(o.dtype, o.heads_kv, c.storage_k, o.head_dim));
    if (wanted & 4) value = zeros(c.rows(o.dtype, o.heads_kv, c.storage_k, o.head_dim_v));
    if (wanted & 8 && c.mask) mask = zeros(Tensor(real, c.mask_size()));
    if (wanted & 16 && o.alibi) alibi = zeros(Tensor(real, {o.batch, o.heads_q, 1, 1}));
    if (wanted & 32 && o.sinks) sinks = zeros(Tensor(real, {1, o.heads_q, 1, 1}));
  }
  BackwardOutputs outputs() const {
    return {query.view(), key.view(), value.view(), mask.view(), alibi.view(), sinks.view()};
  }
};

// Forward and backward as an op runs them: lse and out come from the forward kernel.
Gradients run(const AttentionCase& c, Wanted wanted = kAll) {
  const Options& o = c.o;
  const bool is_16_bit = o.dtype == DType::float16 || o.dtype == DType::bfloat16;
  const Tensor out = c.rows(o.dtype, o.heads_q, c.storage_q, o.head_dim_v);
  const Tensor lse = c.row_terms(), lse_low = c.row_terms();
  Tensor out_low;
  if (is_16_bit) out_low = c.rows(o.dtype, o.heads_q, c.storage_q, o.head_dim_v);
  ForwardOutputs forward;
  forward.out = out.view();
  forward.lse = lse.view();
  forward.out_low = out_low.view();
  forward.lse_low = lse_low.view();
  flash_forward(c.problem, forward);

  BackwardInputs inputs;
  inputs.grad_out = c.grad_out.view();
  inputs.grad_lse = c.grad_lse.view();
  inputs.out = out.view();
  inputs.lse = lse.view();
  inputs.out_low = out_low.view();
  inputs.lse_low = lse_low.view();
  Gradients gradients(c, wanted);
  flash_backward(c.problem, inputs, gradients.outputs());
  return gradients;
}

void expect_matches(const AttentionCase& c, const Gradients& got, const Expected& expected) {
  const DType real = accumulator_of(c.o.dtype);
  const double element = tolerance(c.o.dtype, real), exact = tolerance(real, real);
  if (got.query) expect_close("grad_query", got.query, expected.grad_query, element);
  if (got.key) expect_close("grad_key", got.key, expected.grad_key, element);
  if (got.value) expect_close("grad_value", got.value, expected.grad_value, element);
  // Sums over all pairs: the rounding of each adds up.
  if (got.mask) expect_close("grad_mask", got.mask, expected.grad_mask, 10 * exact);
  if (got.alibi) expect_close("grad_alibi", got.alibi, expected.grad_alibi, 10 * exact);
  if (got.sinks) expect_close("grad_sinks", got.sinks, expected.grad_sinks, 10 * exact);
}

void check(const Options& options) {
  SCOPED_TRACE(options.text());
  const AttentionCase c(options);
  expect_matches(c, run(c), AttentionFormula(c).e);
}

class FlashBackward : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryType, FlashBackward,
                         testing::Values(DType::float16, DType::bfloat16, DType::float32,
                                         DType::float64));

TEST_P(FlashBackward, RandomProblems) {
  for (unsigned seed = 0; seed < 60; ++seed) check(random_options(seed, GetParam()));
}

TEST_P(FlashBackward, NothingAtAll) {
  for (int64_t Options::* size : {&Options::batch, &Options::len_q, &Options::len_k,
                                  &Options::head_dim, &Options::head_dim_v}) {
    for (const bool packed : {false, true}) {
      Options o;
      o.dtype = GetParam();
      o.packed = packed;
      o.sinks = o.alibi = true;
      if (!packed) o.mask = "bhqk";
      o.mask_dtype = accumulator_of(o.dtype);
      o.*size = 0;
      check(o);
    }
  }
  Options o;
  o.dtype = GetParam();
  o.heads_q = 0;
  for (const int64_t heads_kv : {0, 2}) {
    o.heads_kv = heads_kv;
    const AttentionCase c(o);
    expect_close("grad_key", run(c).key, Array(c.key.size()), 0);
  }
}

TEST_P(FlashBackward, ManyTilesAndWideHeads) {
  Options o;
  o.dtype = GetParam();
  o.batch = o.heads_q = o.heads_kv = 1;
  o.len_q = 200;
  o.len_k = 400;
  o.head_dim = o.head_dim_v = 3;
  o.rule.causal = true;
  o.rule.alignment = Alignment::bottom_right;
  o.mask = "1hqk";
  o.mask_dtype = o.dtype;
  check(o);
  o.len_q = 3;
  o.len_k = 5;
  o.head_dim = 512;
  o.head_dim_v = 511;
  check(o);
}

// Each gradient alone is the same as among the others, bit for bit.
TEST(FlashBackward, OnlyWhatIsWanted) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    Options o = random_options(seed, DType::float32);
    o.alibi = o.sinks = true;
    const AttentionCase c(o);
    const Gradients all = run(c);
    Tensor Gradients::* const members[] = {&Gradients::query, &Gradients::key,   &Gradients::value,
                                           &Gradients::mask,  &Gradients::alibi, &Gradients::sinks};
    for (Wanted i = 0; i < 6; ++i) {
      if (!(all.*members[i])) continue;
      EXPECT_EQ((run(c, 1u << i).*members[i]).bytes(), (all.*members[i]).bytes())
          << o.text() << " gradient " << i;
    }
    run(c, 0);
  }
}

TEST(FlashBackward, ThreadsDoNotChangeTheResult) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const AttentionCase c(random_options(seed, DType::float32));
    const Gradients serial = run(c);
    const ThreadHost before = thread_host;
    thread_host.threads = [] { return 3; };
    thread_host.run = [](int64_t workers, ThreadHost::Work work, void* context) {
      std::vector<std::thread> threads;
      for (int64_t w = 0; w < workers; ++w) threads.emplace_back(work, w, w + 1, context);
      for (std::thread& thread : threads) thread.join();
    };
    const Gradients parallel = run(c);
    thread_host = before;
    EXPECT_EQ(serial.query.bytes(), parallel.query.bytes());
    EXPECT_EQ(serial.key.bytes(), parallel.key.bytes());
    EXPECT_EQ(serial.value.bytes(), parallel.value.bytes());
    EXPECT_EQ(serial.mask.bytes(), parallel.mask.bytes());
    EXPECT_EQ(serial.alibi.bytes(), parallel.alibi.bytes());
    EXPECT_EQ(serial.sinks.bytes(), parallel.sinks.bytes());
  }
}

}  // namespace
}  // namespace flashattn::cpu
