// In which order blocks take the tiles of all heads.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "core/tile_schedule.h"

namespace flashattn::cuda {

// Where tiles differ in work, a section of heads goes through its tiles together, largest first:
// blocks that start last are short, so the GPU does not wait for a few of them. A section of one
// head goes through it tile by tile, for the cache.
class BlockOrder {
 public:
  BlockOrder() = default;
  // `parts` tiles of each of `heads`, which are those of all batches, and whatever else divides the
  // work of a head.
  BlockOrder(int64_t parts, int64_t heads, int64_t sections)
      : blocks_(parts * heads), parts_(static_cast<int>(parts)) {
    const int64_t section = heads > 0 ? divide_up(heads, sections) : 1;
    last_ = static_cast<int>(heads / section);
    section_heads_ = Divisor(section);
    section_blocks_ = Divisor(section * parts);
    last_heads_ = Divisor(heads % section);
  }

  struct Place {
    int head, part;
  };
  FLASHATTN_HD Place operator[](int block) const {
    const Divisor::Result section = section_blocks_.divide(block);
    const Divisor& heads = section.quotient == last_ ? last_heads_ : section_heads_;
    const Divisor::Result place = heads.divide(section.rest);
    return {section.quotient * section_heads_.value() + place.rest, place.quotient};
  }
  FLASHATTN_HD int parts() const { return parts_; }
  int64_t blocks() const { return blocks_; }

 private:
  int64_t blocks_ = 0;
  int parts_ = 0;
  int last_ = 0;  // the number of the section that is not whole
  Divisor section_blocks_, section_heads_, last_heads_;
};

}  // namespace flashattn::cuda
