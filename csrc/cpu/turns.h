// Sums that several tasks add to, in a fixed order whatever the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

namespace flashattn::cpu {

// One counter for each sum. The tasks of a sum are numbered 0, 1, ... and must be handed out in
// that order (TaskQueue does): a task then only waits for tasks that some thread is already
// running.
class Turns {
 public:
  explicit Turns(int64_t sums) : finished_(new std::atomic<int32_t>[sums]()) {}

  // Returns when all earlier tasks of the sum have finished with it.
  void wait(int64_t sum, int64_t turn) const {
    for (int spins = 0; finished_[sum].load(std::memory_order_acquire) < turn; ++spins) {
      if (cancelled_.load(std::memory_order_relaxed)) throw std::runtime_error("task cancelled");
      if (spins > kSpins) std::this_thread::yield();
    }
  }
  void finish(int64_t sum) { finished_[sum].fetch_add(1, std::memory_order_release); }

  // Runs a part of a task. If it fails, those that wait for the task shall not wait for ever.
  template <class Body>
  auto guard(const Body& body) {
    try {
      return body();
    } catch (...) {
      cancelled_.store(true, std::memory_order_relaxed);
      throw;
    }
  }

 private:
  static constexpr int kSpins = 1000;  // a few microseconds
  std::unique_ptr<std::atomic<int32_t>[]> finished_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace flashattn::cpu
