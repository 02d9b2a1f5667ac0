// Memory of one worker, allocated once per call and reused by its tasks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace flashattn::cpu {

template <class T>
class Buffer {
 public:
  enum class Fill { none, zero };

  Buffer() = default;
  explicit Buffer(int64_t count, Fill fill = Fill::none) {
    if (count <= 0) return;
    // Aligned here: malloc answers small requests several times as fast as aligned_alloc, and
    // calloc's pages are zero without being touched, so that only what a kernel writes costs
    // memory.
    const size_t bytes = static_cast<size_t>(count) * sizeof(T) + kAlignment;
    memory_.reset(fill == Fill::zero ? std::calloc(1, bytes) : std::malloc(bytes));
    if (!memory_) throw std::bad_alloc();
  }

  T* data() const {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<T*>((address + kAlignment - 1) & -kAlignment);  // null stays null
  }
  T& operator[](int64_t i) const { return data()[i]; }
  explicit operator bool() const { return static_cast<bool>(memory_); }

 private:
  static constexpr uintptr_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace flashattn::cpu
