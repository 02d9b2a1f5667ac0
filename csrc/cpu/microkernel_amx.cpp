// Products on the tile registers of AMX: 16 rows of 64 bytes each. Four hold a block of C of 32 x
// 32, two hold A and two B; one instruction multiplies 16 x 32 by 32 x 16.
#include <atomic>
#include <cstring>

#include "cpu/vector/table.h"

namespace flashattn::cpu {
namespace {

constexpr int64_t kTileRows = 16, kTileColumns = 16, kTileDepth = 32;

// The layout that _tile_loadconfig reads.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Loading a configuration takes as long as hundreds of products: once for each thread and call.
void enter() {
  static const TileConfiguration configuration;
  _tile_loadconfig(&configuration);
}
void leave() { _tile_release(); }

// A block of C of RowTiles x ColumnTiles tiles, at most 2 x 2.
template <int RowTiles, int ColumnTiles>
void block(const MatrixProduct<bfloat16>& p, int64_t row, int64_t column, float* c,
           int64_t c_stride) {
  const bfloat16* a = p.a + row * p.a_stride;
  const bfloat16* b = p.b + column * 2;
  const int64_t a_bytes = p.a_stride * 2, b_bytes = p.b_stride * 4, c_bytes = c_stride * 4;
  float* const lower = c + kTileRows * c_stride;
  // The compiler does not know that tile loads read memory: what it holds back must be written now.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (p.store == Store::accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (ColumnTiles > 1) _tile_loadd(1, c + kTileColumns, c_bytes);
    if constexpr (RowTiles > 1) _tile_loadd(2, lower, c_bytes);
    if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_loadd(3, lower + kTileColumns, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (ColumnTiles > 1) _tile_zero(1);
    if constexpr (RowTiles > 1) _tile_zero(2);
    if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < p.depth; k += kTileDepth) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ColumnTiles > 1) {
      _tile_loadd(7, b + 2 * kTileColumns, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (RowTiles > 1) {
      _tile_loadd(5, a + kTileRows * p.a_stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (ColumnTiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
    a += kTileDepth;
    b += kTileDepth * p.b_stride;
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (ColumnTiles > 1) _tile_stored(1, c + kTileColumns, c_bytes);
  if constexpr (RowTiles > 1) _tile_stored(2, lower, c_bytes);
  if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_stored(3, lower + kTileColumns, c_bytes);
}

// The last rows, fewer than a tile: C has no room for a whole one.
template <int ColumnTiles>
void last_rows(const MatrixProduct<bfloat16>& p, int64_t row, int64_t column) {
  constexpr int64_t kColumns = ColumnTiles * kTileColumns;
  alignas(64) float tile[kTileRows * kColumns];
  float* c = p.c + row * p.c_stride + column;
  if (p.store == Store::accumulate) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      // The rows past C need some value, any: their results are dropped.
      std::memcpy(tile + r * kColumns, row + r < p.rows ? c + r * p.c_stride : c,
                  kColumns * sizeof(float));
    }
  }
  block<1, ColumnTiles>(p, row, column, tile, kColumns);
  for (int64_t r = 0; row + r < p.rows; ++r) {
    std::memcpy(c + r * p.c_stride, tile + r * kColumns, kColumns * sizeof(float));
  }
}

template <int ColumnTiles>
void columns(const MatrixProduct<bfloat16>& p, int64_t column) {
  const auto c_at = [&](int64_t row) { return p.c + row * p.c_stride + column; };
  int64_t row = 0;
  for (; row + 2 * kTileRows <= p.rows; row += 2 * kTileRows) {
    block<2, ColumnTiles>(p, row, column, c_at(row), p.c_stride);
  }
  if (row + kTileRows <= p.rows) {
    block<1, ColumnTiles>(p, row, column, c_at(row), p.c_stride);
    row += kTileRows;
  }
  if (row < p.rows) last_rows<ColumnTiles>(p, row, column);
}

void multiply(const MatrixProduct<bfloat16>& p) {
  int64_t column = 0;
  for (; column + 2 * kTileColumns <= p.columns; column += 2 * kTileColumns) {
    columns<2>(p, column);
  }
  if (column < p.columns) columns<1>(p, column);
}

constexpr Microkernels<bfloat16, bfloat16> table() {
  Microkernels<bfloat16, bfloat16> table = vector_microkernels<bfloat16, bfloat16>();
  table.enter = enter;
  table.leave = leave;
  table.multiply = multiply;
  return table;
}

}  // namespace

constinit const Microkernels<bfloat16, bfloat16> kAmx = table();

}  // namespace flashattn::cpu
