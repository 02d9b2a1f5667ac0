#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace flashattn::cpu {
namespace {

void run_on_threads(int64_t workers, ThreadHost::Work work, void* context) {
  std::vector<std::thread> threads;
  for (int64_t w = 0; w < workers; ++w) threads.emplace_back(work, w, w + 1, context);
  for (std::thread& thread : threads) thread.join();
}

// Runs body with the serial default, then with four threads.
template <class Body>
void with_both_hosts(const Body& body) {
  body();
  const ThreadHost before = thread_host;
  thread_host = {run_on_threads, [] { return 4; }};
  body();
  thread_host = before;
}

TEST(ParallelForEach, RunsEachTaskOnce) {
  with_both_hosts([] {
    for (const int64_t tasks : {0, 1, 3, 4, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      parallel_for_each(tasks, [&](int64_t task) { ++runs[static_cast<size_t>(task)]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  });
}

TEST(ParallelForEach, NoTasksMakeNoScratch) {
  int made = 0;
  const auto make = [&] { return ++made; };
  with_both_hosts([&] { parallel_for_each(0, make, [](int64_t, int&) {}); });
  EXPECT_EQ(made, 0);
}

TEST(ParallelForEach, WorkersShareNoScratch) {
  with_both_hosts([] {
    std::atomic<int> made = 0, in_use[5] = {};
    parallel_for_each(
        200, [&] { return made++; },
        [&](int64_t, int& scratch) {
          EXPECT_EQ(in_use[scratch]++, 0);
          --in_use[scratch];
        });
    EXPECT_GE(made, 1);
    EXPECT_LE(made, 4);
  });
}

TEST(ParallelForEach, AnExceptionStopsTheLoopAndArrives) {
  with_both_hosts([] {
    std::atomic<int> ran = 0;
    const auto body = [&](int64_t task) {
      ++ran;
      if (task == 5) throw std::runtime_error("task 5");
    };
    EXPECT_THROW(parallel_for_each(1000000, body), std::runtime_error);
    EXPECT_LT(ran, 1000000);
  });
}

TEST(ParallelForEach, AnExceptionOfScratchArrivesToo) {
  const auto no_memory = []() -> int { throw std::bad_alloc(); };
  with_both_hosts([&] {
    EXPECT_THROW(parallel_for_each(10, no_memory, [](int64_t, int&) {}), std::bad_alloc);
  });
}

}  // namespace
}  // namespace flashattn::cpu
