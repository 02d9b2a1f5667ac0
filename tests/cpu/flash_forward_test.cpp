#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "attention_formula.h"
#include "cpu/attention.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {
namespace {

struct Results {
  Tensor out, lse, max_logits, out_low, lse_low;
};

bool is_16_bit(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// What rounding lost is asked for in every other call.
Results run(const AttentionCase& c) {
  Results r;
  r.out = c.rows(c.o.dtype, c.o.heads_q, c.storage_q, c.o.head_dim_v);
  r.lse = c.row_terms();
  r.max_logits = Tensor(DType::float32, {c.o.batch, c.o.heads_q, 1, 1});
  if (c.o.seed % 2) r.lse_low = c.row_terms();
  if (c.o.seed % 2 && is_16_bit(c.o.dtype)) {
    r.out_low = c.rows(c.o.dtype, c.o.heads_q, c.storage_q, c.o.head_dim_v);
  }
  ForwardOutputs outputs;
  outputs.out = r.out.view();
  outputs.lse = r.lse.view();
  outputs.max_logits = r.max_logits.view();
  outputs.out_low = r.out_low.view();
  outputs.lse_low = r.lse_low.view();
  flash_forward(c.problem, outputs);
  return r;
}

// Rows of no sequence are left alone; the comparison takes them as 0.
void expect_rows_of_no_sequence_untouched(const AttentionCase& c, Tensor& tensor) {
  tensor.for_each([&](Index4 at) {
    for (const Segment& s : c.segments) {
      if (s.entry == at[0] && at[2] >= s.q_begin && at[2] < s.q_begin + s.len_q) return;
    }
    EXPECT_TRUE(tensor.poisoned(at)) << "row " << at[2];
    tensor.set(at, 0);
  });
}

void check(const Options& options) {
  SCOPED_TRACE(options.text());
  const AttentionCase c(options);
  const AttentionFormula formula(c);
  Results r = run(c);
  const DType real = accumulator_of(options.dtype);
  for (Tensor* tensor : {&r.out, &r.lse, &r.out_low, &r.lse_low}) {
    expect_rows_of_no_sequence_untouched(c, *tensor);
  }
  expect_close("out", r.out, formula.e.out, tolerance(options.dtype, real));
  expect_close("lse", r.lse, formula.e.lse, tolerance(real, real));
  expect_close("max_logits", r.max_logits, formula.e.max_logits, tolerance(DType::float32, real));
  // Together they are the number before it was rounded.
  const auto sum = [](const Tensor& high, const Tensor& low) {
    Tensor result(DType::float64, high.size());
    result.for_each([&](Index4 at) { result.set(at, high.get(at) + low.get(at)); });
    return result;
  };
  if (r.out_low) {
    const double squared = tolerance(options.dtype, real) * 0x1p-7;
    expect_close("out + out_low", sum(r.out, r.out_low), formula.e.out, squared);
  }
  if (r.lse_low) {
    expect_close("lse + lse_low", sum(r.lse, r.lse_low), formula.e.lse, tolerance(real, real));
  }
}

class FlashForward : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryType, FlashForward,
                         testing::Values(DType::float16, DType::bfloat16, DType::float32,
                                         DType::float64));

TEST_P(FlashForward, RandomProblems) {
  for (unsigned seed = 0; seed < 60; ++seed) check(random_options(seed, GetParam()));
}

TEST_P(FlashForward, NothingAtAll) {
  for (int64_t Options::* size : {&Options::batch, &Options::len_q, &Options::len_k,
                                  &Options::head_dim, &Options::head_dim_v}) {
    for (const bool packed : {false, true}) {
      Options o;
      o.dtype = GetParam();
      o.packed = packed;
      o.*size = 0;
      o.sinks = packed;
      check(o);
    }
  }
  Options o;
  o.dtype = GetParam();
  o.heads_q = 0;
  for (const int64_t heads_kv : {0, 2}) {
    o.heads_kv = heads_kv;
    const AttentionCase c(o);
    run(c);
  }
}

TEST_P(FlashForward, ManyTilesAndWideHeads) {
  Options o;
  o.dtype = GetParam();
  o.batch = o.heads_q = o.heads_kv = 1;
  o.len_q = 300;
  o.len_k = 400;
  o.head_dim = o.head_dim_v = 3;
  o.rule.causal = true;
  o.rule.alignment = Alignment::bottom_right;
  check(o);
  o.len_q = 3;
  o.len_k = 5;
  o.head_dim = 512;
  o.head_dim_v = 511;
  check(o);
}

// As in decoding: keys are split, and heads that share them go together.
TEST_P(FlashForward, FewRowsAndManyKeys) {
  Options o;
  o.dtype = GetParam();
  o.seed = 2;  // without what rounding lost: for few rows, and not for training
  for (const int64_t len_q : {1, 3, 8}) {
    for (const bool everything : {false, true}) {
      o.len_q = len_q;
      o.len_k = 1300;
      o.heads_q = 4;
      o.heads_kv = 2;
      o.head_dim = 24;
      o.head_dim_v = 40;
      o.rule = {true, everything ? 700 : kUnlimited, kUnlimited, Alignment::bottom_right};
      o.dropout_p = everything ? 0.3 : 0;
      o.softcap = everything ? 2 : 0;
      o.mask = everything ? "b1qk" : "";
      o.alibi = o.sinks = o.key_lengths = everything;
      check(o);
      o.key_lengths = false;
      o.mask = "";
      o.packed = o.used = true;
      check(o);
      o.packed = o.used = false;
    }
  }
}

// Whatever the lists hold, a sanitizer sees no access outside the tensors.
TEST(FlashForward, NonsenseListsStayInsideTheTensors) {
  std::mt19937_64 random(4);
  for (unsigned seed = 0; seed < 40; ++seed) {
    Options o;
    o.packed = o.used = true;
    o.batch = 4;
    o.seed = seed;
    AttentionCase c(o);
    std::vector<int64_t> lists[4];
    for (auto& list : lists) {
      for (int i = 0; i < 5; ++i) {
        const auto large = static_cast<int64_t>(random());
        list.push_back(random() % 3 ? large % 20 : large);
      }
    }
    c.problem.sequences.cu_q = {nullptr, lists[0].data()};
    c.problem.sequences.cu_k = {nullptr, lists[1].data()};
    c.problem.sequences.used_q = {nullptr, lists[2].data()};
    c.problem.sequences.used_k = {nullptr, lists[3].data()};
    EXPECT_TRUE(run(c).out.gaps_untouched());
  }
}

// Threads change no bit, and every worker has memory of its own.
TEST(FlashForward, ThreadsDoNotChangeTheResult) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const AttentionCase c(random_options(seed, DType::float32));
    const Results serial = run(c);
    const ThreadHost before = thread_host;
    thread_host.threads = [] { return 3; };
    thread_host.run = [](int64_t workers, ThreadHost::Work work, void* context) {
      std::vector<std::thread> threads;
      for (int64_t w = 0; w < workers; ++w) threads.emplace_back(work, w, w + 1, context);
      for (std::thread& thread : threads) thread.join();
    };
    const Results parallel = run(c);
    thread_host = before;
    EXPECT_EQ(serial.out.bytes(), parallel.out.bytes());
    EXPECT_EQ(serial.lse.bytes(), parallel.lse.bytes());
    EXPECT_EQ(serial.max_logits.bytes(), parallel.max_logits.bytes());
  }
}

}  // namespace
}  // namespace flashattn::cpu
