// Packing: from strided tensors to the operands of products, and back.
//
// Everything here is a matrix of words. A word is one element, or two of a 16-bit type: neighbours
// in a row, or the two elements of a column in an even row and the next. The forms of an operand
// are these words in place, or transposed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cpu/microkernels.h"
#include "cpu/vector/transpose.h"

namespace flashattn::cpu {
namespace {

// Two 16-bit vectors, one behind the other.
typedef uint16_t PairWords __attribute__((vector_size(Isa::kBytes)));

inline PairWords to_bfloat_pairs(Vector<float> first, Vector<float> second) {
#if defined(__AVX512BF16__)
  return (PairWords)_mm512_cvtne2ps_pbh(second, first);
#else
  const HalfWords halves[2] = {to_bfloat_bits(first), to_bfloat_bits(second)};
  PairWords pairs;
  std::memcpy(&pairs, halves, sizeof(pairs));
  return pairs;
#endif
}

template <int... Lane>
inline PairWords interleave_halves(PairWords v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (Lane / 2 + Lane % 2 * kLanes<float>)...);
}

// Words of one element each: what every operand but bfloat16 is made of.
template <class Real, class Element>
struct ElementWords {
  using Word = Real;
  const StridedMatrix<const Element>& from;

  int64_t rows() const { return from.rows; }
  int64_t columns() const { return from.columns; }
  const Element* at(int64_t row, int64_t column) const {
    return from.data + row * from.row_stride + column * from.column_stride;
  }
  Vector<Word> load(int64_t row, int64_t column) const { return load_elements(at(row, column)); }
  Vector<Word> load_some(int64_t row, int64_t column) const {
    return cpu::load_some<Real>(at(row, column), from.column_stride, from.columns - column);
  }
};

// Words of two bfloat16 neighbours of a row.
template <class Element>
struct NeighbourWords {
  using Word = uint32_t;
  const StridedMatrix<const Element>& from;

  int64_t rows() const { return from.rows; }
  int64_t columns() const { return (from.columns + 1) / 2; }
  const Element* at(int64_t row, int64_t column) const {
    return from.data + row * from.row_stride + 2 * column * from.column_stride;
  }
  Words load(int64_t row, int64_t column) const {
    const Element* data = at(row, column);
    if constexpr (sizeof(Element) == 2) {
      Words words;
      std::memcpy(&words, data, sizeof(words));
      return words;
    } else {
      return (Words)to_bfloat_pairs(load_elements(data), load_elements(data + kLanes<float>));
    }
  }
  Words load_some(int64_t row, int64_t column) const {
    Element elements[2 * kLanes<float>] = {};
    const int64_t count = from.columns - 2 * column;
    for (int64_t i = 0; i < std::min<int64_t>(count, 2 * kLanes<float>); ++i) {
      elements[i] = at(row, column)[i * from.column_stride];
    }
    return NeighbourWords{{elements, 0, 1, 1, 2 * kLanes<float>}}.load(0, 0);
  }
};

// Words of two bfloat16 of a column, in successive rows.
template <class Element>
struct StackedWords {
  using Word = uint32_t;
  const StridedMatrix<const Element>& from;

  int64_t rows() const { return (from.rows + 1) / 2; }
  int64_t columns() const { return from.columns; }
  const Element* at(int64_t row, int64_t column) const {
    return from.data + 2 * row * from.row_stride + column * from.column_stride;
  }
  Words load(int64_t row, int64_t column) const {
    const Element* upper = at(row, column);
    return stacked(upper, upper + from.row_stride);
  }
  Words load_some(int64_t row, int64_t column) const {
    Element elements[2][kLanes<float>] = {};
    const int64_t count = std::min<int64_t>(from.columns - column, kLanes<float>);
    for (int64_t r = 0; r < std::min<int64_t>(from.rows - 2 * row, 2); ++r) {
      for (int64_t i = 0; i < count; ++i) {
        elements[r][i] = at(row, column)[r * from.row_stride + i * from.column_stride];
      }
    }
    return stacked(elements[0], elements[1]);
  }

 private:
  static Words bits_of(const Element* data) {
    HalfWords bits;
    std::memcpy(&bits, data, sizeof(bits));
    return __builtin_convertvector(bits, Words);
  }
  static Words stacked(const Element* upper, const Element* lower) {
    if constexpr (sizeof(Element) == 2) {
      return bits_of(upper) | bits_of(lower) << 16;
    } else {
      return (Words)interleave_halves(to_bfloat_pairs(load_elements(upper), load_elements(lower)),
                                      std::make_integer_sequence<int, 2 * kLanes<float>>());
    }
  }
};

// How many rows and columns of words can be read a vector at a time.
template <class Source>
struct WholeWords {
  int64_t rows, columns;

  explicit WholeWords(const Source& source) {
    const bool contiguous = source.from.column_stride == 1;
    constexpr int64_t kCount = kLanes<typename Source::Word>;
    const int64_t per_row = source.columns(), per_column = source.rows();
    // An odd last row or column of a pair is not whole.
    rows = per_column - (source.from.rows < per_column * kRowsPerWord);
    columns = (per_row - (source.from.columns < per_row * kColumnsPerWord)) / kCount * kCount;
    if (!contiguous) columns = 0;
  }

 private:
  template <class Element>
  static constexpr int pair_rows(const StackedWords<Element>*) {
    return 2;
  }
  static constexpr int pair_rows(const void*) { return 1; }
  template <class Element>
  static constexpr int pair_columns(const NeighbourWords<Element>*) {
    return 2;
  }
  static constexpr int pair_columns(const void*) { return 1; }
  static constexpr int kRowsPerWord = pair_rows(static_cast<const Source*>(nullptr));
  static constexpr int kColumnsPerWord = pair_columns(static_cast<const Source*>(nullptr));
};

// to (rows, columns) = the words; both sizes padded with zeros to a multiple of 16.
template <class Source>
void place(const Source& source, typename Source::Word* to, int64_t stride) {
  using Word = typename Source::Word;
  const int64_t rows = source.rows(), columns = source.columns();
  const WholeWords<Source> whole(source);
  for (int64_t r = 0; r < padded_columns(rows); ++r, to += stride) {
    int64_t c = 0;
    if (r < whole.rows) {
      for (; c < whole.columns; c += kLanes<Word>) store(to + c, source.load(r, c));
    }
    for (; c < padded_columns(columns); c += kLanes<Word>) {
      store(to + c, r < rows && c < columns ? source.load_some(r, c) : Vector<Word>{});
    }
  }
}

// A block of words at (row, column), one vector for each of its columns; zeros outside.
template <class Source>
void load_transposed(const Source& source, const WholeWords<Source>& whole, int64_t row,
                     int64_t column, Vector<typename Source::Word>* block) {
  using Word = typename Source::Word;
  constexpr int kCount = kLanes<Word>;
  if (row + kCount <= whole.rows && column < whole.columns) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) block[i] = source.load(row + i, column);
  } else {
    for (int i = 0; i < kCount; ++i) {
      const bool inside = row + i < source.rows() && column < source.columns();
      block[i] = inside ? source.load_some(row + i, column) : Vector<Word>{};
    }
  }
  transpose<Word>(block);
}

// to (columns, rows) = the words transposed; both sizes padded with zeros to a multiple of 16.
template <class Source>
void place_transposed(const Source& source, typename Source::Word* to, int64_t stride) {
  using Word = typename Source::Word;
  constexpr int kCount = kLanes<Word>;
  const WholeWords<Source> whole(source);
  for (int64_t c = 0; c < padded_columns(source.columns()); c += kCount) {
    for (int64_t r = 0; r < padded_columns(source.rows()); r += kCount) {
      Vector<Word> block[kCount];
      load_transposed(source, whole, r, c, block);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) store(to + (c + i) * stride + r, block[i]);
    }
  }
}

// sums (rows) = the dot products of the rows of two matrices, added up in the order of a matrix
// product (multiply.h).
template <class Element>
void row_dots(const StridedMatrix<const Element>& a, const StridedMatrix<const Element>& b,
              Accumulator<Element>* sums) {
  using Real = Accumulator<Element>;
  constexpr int kCount = kLanes<Real>;
  const ElementWords<Real, Element> a_words{a}, b_words{b};
  const WholeWords a_whole(a_words), b_whole(b_words);
  for (int64_t r = 0; r < a.rows; r += kCount) {
    MultiplyAddSum<Real> sum;
    for (int64_t c = 0; c < a.columns; c += kCount) {
      Vector<Real> a_block[kCount], b_block[kCount];
      load_transposed(a_words, a_whole, r, c, a_block);
      load_transposed(b_words, b_whole, r, c, b_block);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) sum.add(a_block[i], b_block[i]);
    }
    store_some<Real>(sums + r, 1, a.rows - r, sum.rounded());
  }
}

// The four ways to pack a matrix of elements into an operand. Strides: elements from one row of the
// left form, columns from one depth of the right form, to the next.
template <class Element, class Operand>
struct Pack {
  using From = StridedMatrix<const Element>;
  static constexpr bool kPairs = sizeof(Operand) == 2;
  using Rows = std::conditional_t<kPairs, NeighbourWords<Element>, ElementWords<Operand, Element>>;
  using Columns = std::conditional_t<kPairs, StackedWords<Element>, ElementWords<Operand, Element>>;
  using Word = typename Rows::Word;

  static Word* words(Operand* to) { return reinterpret_cast<Word*>(to); }

  static void left(const From& from, Operand* to, int64_t stride) {
    place(Rows{from}, words(to), kPairs ? stride / 2 : stride);
  }
  static void right(const From& from, Operand* to, int64_t stride) {
    place(Columns{from}, words(to), stride);
  }
  static void left_transposed(const From& from, Operand* to, int64_t stride) {
    place_transposed(Columns{from}, words(to), kPairs ? stride / 2 : stride);
  }
  static void right_transposed(const From& from, Operand* to, int64_t stride) {
    place_transposed(Rows{from}, words(to), stride);
  }
};

// --- packed Reals to a tensor ---

template <class Real, class Element>
void store_matrix(const Real* from, int64_t stride, Real factor, const StridedMatrix<Element>& to) {
  for (int64_t r = 0; r < to.rows; ++r) {
    for (int64_t c = 0; c < to.columns; c += kLanes<Real>) {
      store_some<Real>(to.data + r * to.row_stride + c * to.column_stride, to.column_stride,
                       to.columns - c, load(from + r * stride + c) * factor);
    }
  }
}

// What store_matrix lost by rounding; 0 where it lost everything.
template <class Real, class Element>
void store_rounding(const Real* from, int64_t stride, Real factor,
                    const StridedMatrix<Element>& to) {
  for (int64_t r = 0; r < to.rows; ++r) {
    for (int64_t c = 0; c < to.columns; c += kLanes<Real>) {
      const Vector<Real> exact = load(from + r * stride + c) * factor;
      Element rounded[kLanes<Real>];
      store_elements(rounded, exact);
      const Vector<Real> error = exact - load_elements(rounded);
      store_some<Real>(to.data + r * to.row_stride + c * to.column_stride, to.column_stride,
                       to.columns - c, error - error == Real(0) ? error : Vector<Real>{});
    }
  }
}

// The same of a tile that becomes an operand.
template <class Real, class Operand>
void tile_rounding(const StridedMatrix<const Real>& from, Real* to) {
  for (int64_t r = 0; r < from.rows; ++r) {
    const Real* row = from.data + r * from.row_stride;
    for (int64_t c = 0; c < from.columns; c += kLanes<Real>) {
      Operand rounded[kLanes<Real>];
      store_elements(rounded, load(row + c));
      store(to + r * from.row_stride + c, load(row + c) - load_elements(rounded));
    }
  }
}

template <class Real, class Element>
void store_matrix_transposed(const Real* from, int64_t stride, Real factor,
                             const StridedMatrix<Element>& to) {
  constexpr int kCount = kLanes<Real>;
  for (int64_t r = 0; r < to.rows; r += kCount) {
    for (int64_t c = 0; c < to.columns; c += kCount) {
      Vector<Real> block[kCount];
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) block[i] = load(from + (c + i) * stride + r) * factor;
      transpose<Real>(block);
      for (int i = 0; i < std::min<int64_t>(kCount, to.rows - r); ++i) {
        store_some<Real>(to.data + (r + i) * to.row_stride + c * to.column_stride, to.column_stride,
                         to.columns - c, block[i]);
      }
    }
  }
}

}  // namespace
}  // namespace flashattn::cpu
