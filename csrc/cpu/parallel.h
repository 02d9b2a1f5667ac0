// Parallel loops of the CPU kernels. The threads belong to the host (torch's pool, which
// csrc/ops/threads.cpp installs), so kernels need no torch header; without a host, as in the C++
// tests, loops run serially.
//
// Tasks are taken one by one from a shared counter: uneven tasks (causal tiles, ragged sequences)
// balance themselves. Which worker runs a task is not reproducible; what a task computes must not
// depend on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <type_traits>

namespace flashattn::cpu {

// The host's threads: run(workers, work, context) calls work(begin, end, context) on ranges that
// cover [0, workers), each range on a thread of its own where there are enough threads.
struct ThreadHost {
  using Work = void (*)(int64_t begin, int64_t end, void* context);

  void (*run)(int64_t workers, Work work, void* context) =
      [](int64_t workers, Work work, void* context) { work(0, workers, context); };
  int (*threads)() = [] { return 1; };
};

inline constinit ThreadHost thread_host;

inline int max_threads() { return std::max(1, thread_host.threads()); }

// Hands out tasks [0, tasks) and keeps the first exception, after which no more are handed out.
class TaskQueue {
 public:
  explicit TaskQueue(int64_t tasks) : tasks_(tasks) {}

  std::optional<int64_t> next() {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task < tasks_ && !failed_.load(std::memory_order_relaxed)) return task;
    return std::nullopt;
  }
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = error;
    failed_.store(true, std::memory_order_relaxed);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t tasks_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Calls body(task, scratch) for every task in [0, tasks). Each worker makes one scratch with
// make_scratch(), when it gets its first task. An exception of a body stops the loop and is thrown
// here.
template <class MakeScratch, class Body>
void parallel_for_each(int64_t tasks, const MakeScratch& make_scratch, const Body& body) {
  struct Context {
    TaskQueue queue;
    const MakeScratch& make_scratch;
    const Body& body;
  } context{TaskQueue(tasks), make_scratch, body};

  // A range of workers that shares one thread needs no more than one pass over the queue.
  const auto work = [](int64_t, int64_t, void* opaque) {
    auto& [queue, make_scratch, body] = *static_cast<Context*>(opaque);
    try {
      std::optional<int64_t> task = queue.next();
      if (!task) return;
      auto scratch = make_scratch();
      for (; task; task = queue.next()) body(*task, scratch);
    } catch (...) {
      queue.fail(std::current_exception());
    }
  };

  const int64_t workers = std::min<int64_t>(tasks, max_threads());
  if (workers > 1) {
    thread_host.run(workers, work, &context);
  } else {
    work(0, 1, &context);
  }
  context.queue.rethrow();
}

// Calls body(task) for every task in [0, tasks).
template <class Body>
void parallel_for_each(int64_t tasks, const Body& body) {
  struct Nothing {};
  parallel_for_each(tasks, [] { return Nothing{}; }, [&](int64_t task, Nothing&) { body(task); });
}

}  // namespace flashattn::cpu
