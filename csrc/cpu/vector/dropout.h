// Dropout of whole tiles: Philox on one counter a lane.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/constants.h"
#include "core/dropout.h"
#include "core/mask.h"
#include "cpu/microkernels.h"
#include "cpu/vector/transpose.h"

namespace flashattn::cpu {
namespace {

// philox4x32 of core/philox.h on half as many counters as a vector has 32-bit lanes: each word is
// the low half of a 64-bit lane, and what is in the upper half does not matter.
struct Philox {
  using Lanes = Vector<uint64_t>;
  Lanes word[4];

  static Lanes upper_halves(Lanes lanes) { return lanes >> 32; }

  void round(PhiloxKey key) {
    const Lanes product0 = multiply_low_halves(word[0], Lanes{} + 0xD2511F53u);
    const Lanes product1 = multiply_low_halves(word[2], Lanes{} + 0xCD9E8D57u);
    word[0] = upper_halves(product1) ^ word[1] ^ key.word[0];
    word[1] = product1;
    word[2] = upper_halves(product0) ^ word[3] ^ key.word[1];
    word[3] = product0;
  }
};

// The numbers of the next 8 * kLanes<uint32_t> columns of a row, in column order; `group` is the
// first column's group, a multiple of 4.
inline void dropout_numbers(const DropoutStream& stream, int64_t row, int64_t group,
                            uint16_t* numbers) {
  using Lanes = Philox::Lanes;
  const Lanes first = 2 * lane_numbers<uint64_t>() + static_cast<uint64_t>(group);
  Philox even{{Lanes{} + stream.position, Lanes{} + (stream.position >> 32),
               Lanes{} + static_cast<uint64_t>(row), first}};
  Philox odd = even;
  odd.word[3] = first + 1;
  PhiloxKey key = stream.key;
  for (int round = 0; round < kDropoutRounds; ++round) {
    even.round(key);
    odd.round(key);
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  // 128 bits of output word w, from one block's four groups, are the numbers of columns 8w .. 8w +
  // 7 of its 32.
  constexpr int kBlocks = kLanes<uint64_t> / 2;
  Lanes words[4];
  for (int w = 0; w < 4; ++w) words[w] = (even.word[w] & 0xffffffffu) | odd.word[w] << 32;
  for (int w = 0; w < 4; w += kBlocks) {
    transpose<uint64_t, 2>(words + w);
    for (int block = 0; block < kBlocks; ++block) {
      std::memcpy(numbers + block * 32 + w * 8, &words[w + block], sizeof(Lanes));
    }
  }
}

template <class Real>
inline Vector<Real> keep_factors(const uint16_t* numbers, uint32_t threshold, Real keep_scale) {
  using Integer = std::conditional_t<sizeof(Real) == 8, int64_t, int32_t>;
  typedef uint16_t Numbers __attribute__((vector_size(2 * kLanes<Real>)));
  Numbers some;
  std::memcpy(&some, numbers, sizeof(some));
  const Vector<Integer> wide = __builtin_convertvector(some, Vector<Integer>);
  return wide < static_cast<Integer>(threshold) ? broadcast(keep_scale) : Vector<Real>{};
}

// factors (rows, padded keys) = 0, or keep_scale.
template <class Real>
void dropout_tile(const DropoutStream& stream, Range rows, Range keys, Real keep_scale,
                  Real* factors, int64_t stride) {
  constexpr int64_t kStep = 8 * kLanes<uint32_t>;
  constexpr int64_t kPiece = 256;  // columns at a time
  // Also those of the columns that pad the tile: some number, so that no factor is left as it was.
  uint16_t numbers[kPiece + 2 * kStep] = {};
  for (int64_t row = rows.begin; row < rows.end; ++row, factors += stride) {
    for (int64_t piece = keys.begin; piece < keys.end; piece += kPiece) {
      const int64_t end = piece + kPiece < keys.end ? piece + kPiece : keys.end;
      const int64_t first = piece / kDropoutBlock * kDropoutBlock;
      for (int64_t col = first; col < end; col += kStep) {
        dropout_numbers(stream, row, col / kDropoutBlock * 4, numbers + (col - first));
      }
      const int64_t padded = keys.begin + padded_columns(end - keys.begin);
      for (int64_t col = piece; col < padded; col += kLanes<Real>) {
        store(factors + (col - keys.begin),
              keep_factors<Real>(numbers + (col - first), stream.threshold, keep_scale));
      }
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
