#include <gtest/gtest.h>

#include "attention_formula.h"
#include "cpu/attention.h"

namespace flashattn::cpu {
namespace {

// Dense problems only: packed calls have no naive form.
Options dense_options(unsigned seed, DType dtype) {
  Options o = random_options(seed, dtype);
  o.packed = o.used = false;
  return o;
}

struct Results {
  Tensor out, lse, max_logits, weights, probs;

  explicit Results(const AttentionCase& c)
      : out(c.rows(c.o.dtype, c.o.heads_q, c.o.len_q, c.o.head_dim_v)),
        lse(c.row_terms()),
        max_logits(DType::float32, {c.o.batch, c.o.heads_q, 1, 1}),
        probs(c.o.dtype, {c.o.batch, c.o.heads_q, c.o.len_q, c.o.len_k}) {
    if (c.o.seed % 2) weights = Tensor(c.o.dtype, probs.size());
    naive_forward(c.problem,
                  {out.view(), lse.view(), max_logits.view(), weights.view(), probs.view()});
  }
};

void check_forward(const Options& options) {
  SCOPED_TRACE(options.text());
  const AttentionCase c(options);
  const AttentionFormula formula(c);
  const Results r(c);
  const DType real = accumulator_of(options.dtype);
  const double element = tolerance(options.dtype, real);
  expect_close("out", r.out, formula.e.out, element);
  expect_close("lse", r.lse, formula.e.lse, tolerance(real, real));
  expect_close("max_logits", r.max_logits, formula.e.max_logits, tolerance(DType::float32, real));
  expect_close("probs", r.probs, formula.e.probs, element);
  if (r.weights) expect_close("weights", r.weights, formula.e.weights, element);
}

// Backward reads the probabilities in the element type: their rounding goes through the row term.
void check_backward(const Options& o) {
  SCOPED_TRACE(o.text());
  const AttentionCase c(o);
  const Expected expected = AttentionFormula(c).e;
  const Results r(c);
  const DType real = accumulator_of(o.dtype);
  const auto zeros = [](Tensor tensor) {
    tensor.fill(0);
    return tensor;
  };
  const Tensor query = zeros(c.rows(o.dtype, o.heads_q, o.len_q, o.head_dim));
  const Tensor key = zeros(c.rows(o.dtype, o.heads_kv, o.len_k, o.head_dim));
  const Tensor value = zeros(c.rows(o.dtype, o.heads_kv, o.len_k, o.head_dim_v));
  Tensor mask, alibi, sinks;
  if (c.mask) mask = zeros(Tensor(real, c.mask_size()));
  if (o.alibi) alibi = zeros(Tensor(real, {o.batch, o.heads_q, 1, 1}));
  if (o.sinks) sinks = zeros(Tensor(real, {1, o.heads_q, 1, 1}));
  naive_backward(c.problem,
                 {c.grad_out.view(), c.grad_lse.view(), {}, r.probs.view(), r.lse.view()},
                 {query.view(), key.view(), value.view(), mask.view(), alibi.view(), sinks.view()});

  const double element = 4 * tolerance(o.dtype, real);
  expect_close("grad_query", query, expected.grad_query, element);
  expect_close("grad_key", key, expected.grad_key, element);
  expect_close("grad_value", value, expected.grad_value, element);
  if (mask) expect_close("grad_mask", mask, expected.grad_mask, element);
  if (alibi) expect_close("grad_alibi", alibi, expected.grad_alibi, element);
  if (sinks) expect_close("grad_sinks", sinks, expected.grad_sinks, element);
}

class NaiveAttention : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryType, NaiveAttention,
                         testing::Values(DType::float16, DType::bfloat16, DType::float32,
                                         DType::float64));

TEST_P(NaiveAttention, RandomProblemsForward) {
  for (unsigned seed = 0; seed < 40; ++seed) check_forward(dense_options(seed, GetParam()));
}

TEST_P(NaiveAttention, RandomProblemsBackward) {
  for (unsigned seed = 0; seed < 40; ++seed) check_backward(dense_options(seed, GetParam()));
}

TEST_P(NaiveAttention, NothingAtAll) {
  for (int64_t Options::* size : {&Options::batch, &Options::len_q, &Options::len_k,
                                  &Options::head_dim, &Options::head_dim_v}) {
    Options o;
    o.dtype = GetParam();
    o.sinks = o.alibi = true;
    o.mask = "bhqk";
    o.mask_dtype = accumulator_of(o.dtype);
    o.*size = 0;
    check_forward(o);
    check_backward(o);
  }
}

}  // namespace
}  // namespace flashattn::cpu
