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
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) & -kAlignment;
    // calloc's pages are zero without being touched; only what a kernel writes costs memory.
    memory_.reset(fill == Fill::zero ? std::calloc(1, bytes)
                                     : std::aligned_alloc(kAlignment, bytes));
    if (!memory_) throw std::bad_alloc();
  }

  T* data() const { return static_cast<T*>(memory_.get()); }
  T& operator[](int64_t i) const { return data()[i]; }
  explicit operator bool() const { return static_cast<bool>(memory_); }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace flashattn::cpu
