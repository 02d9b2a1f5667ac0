// The matrix product in vector registers: a block of C stays there while depth runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/microkernels.h"
#include "cpu/vector/vector.h"

namespace flashattn::cpu {
namespace {

// One depth step of a product: sum += a row of B times one word of A.
template <class Operand>
struct Arithmetic {
  using Word = Operand;
  using Sum = MultiplyAddSum<Operand>;
  static constexpr int kPerWord = 1;  // depths

  static void step(Sum& sum, Vector<Word> b, Word a) { sum.add(b, broadcast(a)); }
};

#if defined(__AVX512BF16__)
template <>
struct Arithmetic<bfloat16> {
  using Word = uint32_t;
  struct Sum {
    Vector<float> sum{};
    Vector<float> rounded() const { return sum; }
  };
  static constexpr int kPerWord = 2;

  static void step(Sum& s, Words b, Word a) {
    const auto both = (__m512bh)_mm512_set1_epi32(static_cast<int>(a));
    s.sum = _mm512_dpbf16_ps(s.sum, (__m512bh)b, both);
  }
};
#endif

template <class Operand>
struct VectorProduct {
  using Product = MatrixProduct<Operand>;
  using Real = Accumulator<Operand>;
  using Word = typename Arithmetic<Operand>::Word;
  static constexpr int kLanes = flashattn::cpu::kLanes<Real>;
  static constexpr int kPerWord = Arithmetic<Operand>::kPerWord;

  static Word word_at(const Operand* from) {
    Word word;
    std::memcpy(&word, from, sizeof(word));
    return word;
  }
  static Vector<Word> words_at(const Operand* from) {
    Vector<Word> words;
    std::memcpy(&words, from, sizeof(words));
    return words;
  }

  template <int Rows, int Vectors>
  static void block(const Product& p, int64_t row, int64_t column) {
    const Operand* a = p.a + row * p.a_stride;
    const Operand* b = p.b + column * kPerWord;
    Real* c = p.c + row * p.c_stride + column;
    typename Arithmetic<Operand>::Sum sum[Rows][Vectors] = {};
    const int64_t steps = (p.depth + kPerWord - 1) / kPerWord;
    for (int64_t k = 0; k < steps; ++k) {
      Vector<Word> row_of_b[Vectors];
      for (int v = 0; v < Vectors; ++v) row_of_b[v] = words_at(b + v * kLanes * kPerWord);
      for (int r = 0; r < Rows; ++r) {
        const Word word = word_at(a + r * p.a_stride);
        for (int v = 0; v < Vectors; ++v) {
          Arithmetic<Operand>::step(sum[r][v], row_of_b[v], word);
        }
      }
      a += kPerWord;
      b += p.b_stride * kPerWord;
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        Real* to = c + r * p.c_stride + v * kLanes;
        const Vector<Real> total = sum[r][v].rounded();
        store(to, p.store == Store::accumulate ? load(to) + total : total);
      }
    }
  }

  // The last rows, fewer than a full block.
  template <int Rows, int Vectors>
  static void last_rows(const Product& p, int64_t row, int64_t column) {
    if constexpr (Rows > 0) {
      if (p.rows - row == Rows) return block<Rows, Vectors>(p, row, column);
      last_rows<Rows - 1, Vectors>(p, row, column);
    }
  }

  template <int Vectors>
  static void columns(const Product& p, int64_t column) {
    int64_t row = 0;
    for (; row + Isa::kRows <= p.rows; row += Isa::kRows) {
      block<Isa::kRows, Vectors>(p, row, column);
    }
    last_rows<Isa::kRows - 1, Vectors>(p, row, column);
  }

  // The widest blocks, but none of a single vector where two narrower ones can share its columns:
  // it would wait for its own sums.
  static void multiply(const Product& p) {
    constexpr int kMost = Isa::kVectors;
    for (int64_t column = 0; column < p.columns;) {
      const int64_t left = (p.columns - column) / kLanes;
      const int64_t take = left == kMost + 1 ? left / 2 + 1 : std::min<int64_t>(left, kMost);
      columns_of<kMost>(p, column, take);
      column += take * kLanes;
    }
  }

 private:
  template <int Vectors>
  static void columns_of(const Product& p, int64_t column, int64_t vectors) {
    if constexpr (Vectors > 0) {
      if (vectors == Vectors) return columns<Vectors>(p, column);
      columns_of<Vectors - 1>(p, column, vectors);
    }
  }
};

}  // namespace
}  // namespace flashattn::cpu
