// Square blocks of vectors, transposed in registers.
#pragma once

#include <utility>

#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// One step: swaps the off-diagonal quarters of every block of 2 * Half by 2 * Half units, a unit
// being `Unit` neighbouring lanes.
template <int Half, int Unit, int Rows, class Word, int... Lane>
inline void swap_quarters(Vector<Word>* rows, std::integer_sequence<int, Lane...>) {
  constexpr int kCount = kLanes<Word>, kShift = Half * Unit;
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
    if (i & Half) continue;
    const Vector<Word> a = rows[i], b = rows[i + Half];
    rows[i] = __builtin_shufflevector(a, b, (Lane & kShift ? kCount + Lane - kShift : Lane)...);
    rows[i + Half] =
        __builtin_shufflevector(a, b, (Lane & kShift ? kCount + Lane : Lane + kShift)...);
  }
}

// Transposes rows[0, lanes / Unit), as a matrix of units.
template <class Word, int Unit = 1, int Half = 1>
inline void transpose(Vector<Word>* rows) {
  constexpr int kRows = kLanes<Word> / Unit;
  if constexpr (Half < kRows) {
    swap_quarters<Half, Unit, kRows, Word>(rows, std::make_integer_sequence<int, kLanes<Word>>());
    transpose<Word, Unit, 2 * Half>(rows);
  }
}

}  // namespace
}  // namespace flashattn::cpu
