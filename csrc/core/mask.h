// Which keys a query sees: causality, sliding window and length of one sequence.
//
// The mask answers both "is this pair visible" and "which tiles hold a visible pair", from the
// same two inequalities, so that tile bounds and the predicate cannot drift apart:
//   row + shift - left <= col <= row + shift + right   and   0 <= col < len_k
#pragma once

#include <cstdint>

#include "core/constants.h"
#include "core/host_device.h"

namespace flashattn {

enum class Alignment : uint8_t { top_left, bottom_right };

// Positions are 64-bit on the CPU. CUDA kernels, which keep many in registers, use 32-bit ones.
template <class Index>
struct RangeOf {
  Index begin, end;  // half open
  FLASHATTN_HD bool empty() const { return begin >= end; }
  FLASHATTN_HD Index size() const { return empty() ? 0 : end - begin; }
  FLASHATTN_HD RangeOf moved(Index by) const { return {begin + by, end + by}; }
  FLASHATTN_HD RangeOf overlap(RangeOf other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
};
using Range = RangeOf<int64_t>;

// A window side without a limit. Lengths stay below it, so that `row + shift + unlimited` cannot
// overflow.
template <class Index>
inline constexpr Index kUnlimitedOf =
    static_cast<Index>(sizeof(Index) == 8 ? kUnlimited : int64_t{1} << 29);

// The mask of one sequence. Rows and columns are positions inside the sequence.
template <class Index>
struct SequenceMaskOf {
  using Range = RangeOf<Index>;

  Index len_q, len_k;
  Index shift;        // the diagonal: row i is aligned with column i + shift
  Index left, right;  // inclusive reach on both sides of the diagonal, or kUnlimitedOf

  FLASHATTN_HD bool visible(Index row, Index col) const {
    const Index diagonal = row + shift;
    return col >= diagonal - left && col <= diagonal + right && col >= 0 && col < len_k;
  }

  // The keys that at least one of the rows [begin, end) sees (a superset without holes).
  FLASHATTN_HD Range keys_for(Range rows) const {
    if (rows.empty()) return {0, 0};
    return clip(rows.begin + shift - left, rows.end + shift + right, len_k);
  }

  // The queries that see at least one of the keys [begin, end) (a superset without holes).
  FLASHATTN_HD Range queries_for(Range keys) const {
    if (keys.empty()) return {0, 0};
    return clip(keys.begin - shift - right, keys.end - shift + left, len_q);
  }

  // The keys that every one of the rows [begin, end) sees; may be empty.
  FLASHATTN_HD Range keys_for_all(Range rows) const {
    const Index begin = rows.end - 1 + shift - left, end = rows.begin + shift + right + 1;
    return {begin < 0 ? 0 : begin, end > len_k ? len_k : end};
  }

  // True when every pair of the tile is visible: the tile needs no masking.
  FLASHATTN_HD bool all_visible(Range rows, Range keys) const {
    const Range all = keys_for_all(rows);
    return keys.begin >= all.begin && keys.end <= all.end;
  }

 private:
  FLASHATTN_HD static Range clip(Index begin, Index end, Index length) {
    begin = begin < 0 ? 0 : begin;
    end = end > length ? length : end;
    return begin < end ? Range{begin, end} : Range{0, 0};
  }
};
using SequenceMask = SequenceMaskOf<int64_t>;

// The mask as the caller wrote it; a sequence's lengths make it concrete.
struct MaskRule {
  bool causal = false;
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  Alignment alignment = Alignment::top_left;

  template <class Index = int64_t>
  FLASHATTN_HD SequenceMaskOf<Index> for_sequence(int64_t len_q, int64_t len_k) const {
    const int64_t shift = alignment == Alignment::bottom_right ? len_k - len_q : 0;
    return {static_cast<Index>(len_q), static_cast<Index>(len_k), static_cast<Index>(shift),
            reach<Index>(window_left), causal ? Index{0} : reach<Index>(window_right)};
  }

 private:
  // A caller's own idea of "no limit", such as INT64_MAX, must not overflow in the inequalities.
  template <class Index>
  FLASHATTN_HD static Index reach(int64_t window) {
    return window < kUnlimitedOf<Index> ? static_cast<Index>(window) : kUnlimitedOf<Index>;
  }
};

}  // namespace flashattn
