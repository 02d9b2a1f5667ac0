// Tensors for the tests of the kernels: any dtype, any strides, exactly as much memory as they need
// (a sanitizer sees one element too far), and poison in every element that belongs to none of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "core/tensor_view.h"

namespace flashattn::cpu {

using Index4 = std::array<int64_t, 4>;

// How a tensor lies in memory.
struct Layout {
  std::array<int, 4> order{0, 1, 2, 3};  // dimensions from the slowest to the fastest
  int64_t gap = 0;                       // unused elements after each element
  int64_t offset = 0;                    // unused elements before the first
  std::array<bool, 4> expanded{};        // stride 0: all indices of the dimension are one element
};

inline DType accumulator_of(DType dtype) {
  return dtype == DType::float64 ? DType::float64 : DType::float32;
}

// All bits set: NaN in every float dtype.
constexpr unsigned char kPoison = 0xff;

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Index4 size, const Layout& layout = {}) : dtype_(dtype), size_(size) {
    int64_t stride = 1 + layout.gap;
    for (int i = 3; i >= 0; --i) {
      const int d = layout.order[static_cast<size_t>(i)];
      stride_[d] = layout.expanded[d] ? 0 : stride;
      if (!layout.expanded[d]) stride *= std::max<int64_t>(size[d], 1);
    }
    offset_ = layout.offset;
    int64_t last = offset_;
    for (int d = 0; d < 4; ++d) last += (size[d] - 1) * stride_[d];
    const int64_t elements = numel() ? last + 1 : offset_;
    bytes_ = static_cast<size_t>(elements * size_of(dtype));
    memory_.reset(new unsigned char[bytes_]);  // a vector may own more than its size
    std::memset(memory_.get(), kPoison, bytes_);
  }

  DType dtype() const { return dtype_; }
  const Index4& size() const { return size_; }
  int64_t numel() const { return size_[0] * size_[1] * size_[2] * size_[3]; }
  explicit operator bool() const { return memory_ != nullptr; }

  UntypedView4 view() const {
    UntypedView4 view;
    if (!memory_) return view;
    view.data = memory_.get() + offset_ * size_of(dtype_);
    std::copy_n(size_.begin(), 4, view.size);
    std::copy_n(stride_.begin(), 4, view.stride);
    return view;
  }

  double get(Index4 at) const {
    const unsigned char* from = address(at);
    switch (dtype_) {
      case DType::boolean: return *from;
      case DType::float16: return static_cast<float>(read<float16>(from));
      case DType::bfloat16: return static_cast<float>(read<bfloat16>(from));
      case DType::float32: return read<float>(from);
      case DType::float64: return read<double>(from);
    }
    return 0;
  }

  void set(Index4 at, double value) {
    unsigned char* to = address(at);
    switch (dtype_) {
      case DType::boolean: *to = value != 0; break;
      case DType::float16: write(to, convert<float16>(value)); break;
      case DType::bfloat16: write(to, convert<bfloat16>(value)); break;
      case DType::float32: write(to, static_cast<float>(value)); break;
      case DType::float64: write(to, value); break;
    }
  }

  template <class Body>
  void for_each(const Body& body) const {
    for (int64_t a = 0; a < size_[0]; ++a) {
      for (int64_t b = 0; b < size_[1]; ++b) {
        for (int64_t c = 0; c < size_[2]; ++c) {
          for (int64_t d = 0; d < size_[3]; ++d) body(Index4{a, b, c, d});
        }
      }
    }
  }
  void fill(double value) {
    for_each([&](Index4 at) { set(at, value); });
  }

  // Whether an element still holds poison, and whether all memory between the elements does.
  bool poisoned(Index4 at) const {
    const unsigned char* from = address(at);
    return std::all_of(from, from + size_of(dtype_), [](auto byte) { return byte == kPoison; });
  }
  bool gaps_untouched() const {
    std::vector<bool> used(bytes_);
    for_each([&](Index4 at) {
      const int64_t begin = address(at) - memory_.get();
      std::fill_n(used.begin() + begin, size_of(dtype_), true);
    });
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i] && memory_[i] != kPoison) return false;
    }
    return true;
  }
  std::vector<unsigned char> bytes() const { return {memory_.get(), memory_.get() + bytes_}; }

 private:
  template <class T>
  static T read(const unsigned char* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  template <class T>
  static void write(unsigned char* to, T value) {
    std::memcpy(to, &value, sizeof(T));
  }
  unsigned char* address(Index4 at) const {
    int64_t offset = offset_;
    for (int d = 0; d < 4; ++d) offset += at[d] * stride_[d];
    return memory_.get() + offset * size_of(dtype_);
  }

  DType dtype_ = DType::float32;
  Index4 size_{}, stride_{};
  int64_t offset_ = 0;
  size_t bytes_ = 0;
  std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace flashattn::cpu
