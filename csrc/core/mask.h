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

struct Range {
  int64_t begin, end;  // half open
  FLASHATTN_HD bool empty() const { return begin >= end; }
  FLASHATTN_HD int64_t size() const { return empty() ? 0 : end - begin; }
  FLASHATTN_HD Range moved(int64_t by) const { return {begin + by, end + by}; }
  FLASHATTN_HD Range overlap(Range other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
};

// The mask of one sequence. Rows and columns are positions inside the sequence.
struct SequenceMask {
  int64_t len_q, len_k;
  int64_t shift;        // the diagonal: row i is aligned with column i + shift
  int64_t left, right;  // inclusive reach on both sides of the diagonal, or kUnlimited

  FLASHATTN_HD bool visible(int64_t row, int64_t col) const {
    const int64_t diagonal = row + shift;
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

  // True when every pair of the tile is visible: the tile needs no masking.
  FLASHATTN_HD bool all_visible(Range rows, Range keys) const {
    return keys.begin >= rows.end - 1 + shift - left &&
           keys.end - 1 <= rows.begin + shift + right && keys.begin >= 0 && keys.end <= len_k;
  }

 private:
  FLASHATTN_HD static Range clip(int64_t begin, int64_t end, int64_t length) {
    begin = begin < 0 ? 0 : begin;
    end = end > length ? length : end;
    return begin < end ? Range{begin, end} : Range{0, 0};
  }
};

// The mask as the caller wrote it; a sequence's lengths make it concrete.
struct MaskRule {
  bool causal = false;
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  Alignment alignment = Alignment::top_left;

  FLASHATTN_HD SequenceMask for_sequence(int64_t len_q, int64_t len_k) const {
    const int64_t shift = alignment == Alignment::bottom_right ? len_k - len_q : 0;
    return {len_q, len_k, shift, reach(window_left), causal ? 0 : reach(window_right)};
  }

 private:
  // A caller's own idea of "no limit", such as INT64_MAX, must not overflow in the inequalities.
  FLASHATTN_HD static int64_t reach(int64_t window) {
    return window < kUnlimited ? window : kUnlimited;
  }
};

}  // namespace flashattn
