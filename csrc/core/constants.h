// Numbers that the whole package agrees on. Each has this one home.
#pragma once

#include <cstdint>
#include <limits>

namespace flashattn {

// A window side without a limit. Small enough that `row + shift + kUnlimited` cannot overflow.
inline constexpr int64_t kUnlimited = int64_t{1} << 60;

// The widest head that the fused kernels take, for head_dim and head_dim_v alike.
inline constexpr int64_t kMaxHeadDim = 512;

// Philox rounds of the dropout bits: 7 pass BigCrush (Salmon et al., SC 2011).
inline constexpr int kDropoutRounds = 7;

// Dropout compares 16-bit numbers, so a keep rate is a multiple of 1 / kDropoutLevels.
inline constexpr uint32_t kDropoutLevels = 65536;

template <class Real>
inline constexpr Real kNegativeInfinity = -std::numeric_limits<Real>::infinity();

}  // namespace flashattn
