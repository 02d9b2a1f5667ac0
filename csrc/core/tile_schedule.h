// How a problem is cut into tiles and tasks. The cut depends on the problem alone, never on the
// number of threads, so results are bitwise reproducible.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/mask.h"

namespace flashattn {

FLASHATTN_HD int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// A range cut into pieces of `tile`; the last piece may be short.
struct Tiles {
  Range range;
  int64_t tile;

  FLASHATTN_HD int64_t count() const { return divide_up(range.size(), tile); }
  FLASHATTN_HD Range operator[](int64_t i) const {
    const int64_t begin = range.begin + i * tile;
    return {begin, begin + tile < range.end ? begin + tile : range.end};
  }
};

// The tiles of [0, length) that cover `range`, aligned to multiples of `tile`.
FLASHATTN_HD Tiles aligned_tiles(Range range, int64_t tile) {
  if (range.empty()) return {{0, 0}, tile};
  return {{range.begin / tile * tile, range.end}, tile};
}

// A flat task index taken apart, slowest dimension first.
struct Task {
  int64_t batch, head, part;
};

struct TaskGrid {
  int64_t batch, heads, parts;

  FLASHATTN_HD int64_t count() const { return batch * heads * parts; }
  FLASHATTN_HD Task operator[](int64_t i) const {
    return {i / (heads * parts), i / parts % heads, i % parts};
  }
};

}  // namespace flashattn
