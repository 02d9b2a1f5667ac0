// The recomputed probabilities of one tile and the gradient of its scores: what backward does
// before it multiplies with query, key or grad_out. Shared by the passes of backward.
//
// All operands are packed so that every product reads its tile as it lies: products that sum over
// queries give transposed results, (head_dim, keys).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/online_softmax.h"
#include "core/problem.h"
#include "cpu/microkernels.h"
#include "cpu/scratch.h"

namespace flashattn::cpu {

struct GradientTileSize {
  static constexpr int64_t kQueries = 64, kDiagonalQueries = 32;
  static constexpr int64_t kKeys = 128;
  static constexpr int64_t kMostKeys = 512;  // packed at a time
};

template <class Element, class Operand>
class GradientTile {
  using Real = Accumulator<Element>;
  static constexpr int64_t kQueries = GradientTileSize::kQueries;
  // Tiles become operands by packing: rounded, and what that loses, since gradients shall be as
  // exact as their own rounding.
  static constexpr bool kPacks = !std::is_same_v<Operand, Real>;
  static constexpr int kParts = kPacks ? 2 : 1;

 public:
  static constexpr int64_t kPair = sizeof(Operand) == 2 ? 2 : 1;
  static constexpr int64_t kStride = spread_stride(GradientTileSize::kKeys);
  static constexpr int64_t kLeftStride = padded_depth<Operand>(kStride);
  static constexpr int64_t kTile = kQueries * kStride, kLeftTile = kQueries * kLeftStride;
  static constexpr int64_t kQueryStride = padded_depth<Operand>(kQueries);

  // most_keys: of a block.
  GradientTile(const AttentionProblem& problem, const BackwardInputs& inputs, int64_t most_keys)
      : p_(problem),
        inputs_(inputs),
        kernels_(microkernels<Element, Operand>()),
        use_(kernels_),
        keys_stride_(spread_stride(most_keys)),
        key_stride_(spread_stride(p_.head_dim)),
        depth_(padded_depth<Operand>(p_.head_dim)),
        depth_v_(padded_depth<Operand>(p_.head_dim_v)),
        keys_(round_up(most_keys, 32) * key_stride_),
        keys_t_(depth_ * keys_stride_),
        values_t_(depth_v_ * keys_stride_),
        queries_(kQueries * depth_),
        queries_t_(depth_ * kQueryStride),
        grad_outs_(kQueries * depth_v_),
        grad_out_t_(depth_v_ * kQueryStride),
        lse_(kQueries),
        weights_(kQueries * kStride),
        grads_(kQueries * kStride),
        slopes_(p_.softcap > 0 ? kQueries * kStride : 0),
        factors_(p_.dropout ? kQueries * kStride : 0),
        lost_(kPacks ? kTile : 0),
        weights_right_(kPacks ? kParts * kTile : 0),
        dots_left_(kPacks ? kParts * kLeftTile : 0),
        dots_right_(kPacks ? kParts * kTile : 0) {}

  void load_keys(int64_t batch, int64_t kv_head, const Sequence& sequence, Range keys) {
    loaded_keys_ = keys;
    const Range rows = keys.moved(sequence.k_begin);
    const auto key = rows_of<const Element>(p_.key, batch, kv_head, rows, p_.head_dim);
    const auto value = rows_of<const Element>(p_.value, batch, kv_head, rows, p_.head_dim_v);
    key_ = right_operand(kernels_, key, keys_.data(), key_stride_);
    kernels_.pack_right_transposed(key, keys_t_.data(), keys_stride_);
    kernels_.pack_right_transposed(value, values_t_.data(), keys_stride_);
  }

  // `deltas` holds the row terms of the rows.
  void load_queries(int64_t batch, int64_t head, const Sequence& sequence, Range rows,
                    const Real* deltas) {
    loaded_rows_ = rows;
    deltas_ = deltas;
    const Range stored = rows.moved(sequence.q_begin);
    const auto query = rows_of<const Element>(p_.query, batch, head, stored, p_.head_dim);
    const auto grad_out =
        rows_of<const Element>(inputs_.grad_out, batch, head, stored, p_.head_dim_v);
    query_ = left_operand(kernels_, query, queries_.data(), depth_);
    kernels_.pack_left_transposed(query, queries_t_.data(), kQueryStride);
    grad_out_ = left_operand(kernels_, grad_out, grad_outs_.data(), depth_v_);
    kernels_.pack_left_transposed(grad_out, grad_out_t_.data(), kQueryStride);
    const auto lse = inputs_.lse.as<const Real>();
    const auto lse_low = inputs_.lse_low.as<const Real>();
    for (int64_t r = 0; r < rows.size(); ++r) {
      const int64_t i = sequence.q_begin + rows.begin + r;
      lse_[r] = {*lse.at(batch, head, i), lse_low ? *lse_low.at(batch, head, i) : Real(0)};
    }
  }

  // Fills weights, grad_scores and grad_dots for some of the loaded queries and keys; both ranges
  // begin at a multiple of 32 from the first loaded one.
  void compute(int64_t batch, int64_t head, const ScoreTerms<Real>& terms, Range rows, Range keys) {
    rows_ = rows;
    keys_range_ = keys;
    const int64_t row = rows.begin - loaded_rows_.begin, column = keys.begin - loaded_keys_.begin;
    const int64_t columns = padded_columns(keys.size());
    kernels_.dot_products({rows.size(), columns, p_.head_dim, query_ + row * depth_, depth_,
                           keys_t_.data() + column * kPair, keys_stride_, weights_.data(), kStride,
                           Store::overwrite});
    kernels_.dot_products({rows.size(), columns, p_.head_dim_v, grad_out_ + row * depth_v_,
                           depth_v_, values_t_.data() + column * kPair, keys_stride_, grads_.data(),
                           kStride, Store::overwrite});
    if (p_.dropout) {
      const DropoutStream stream = p_.dropout.stream(batch, p_.heads_q, head);
      kernels_.dropout_tile(stream, rows, keys, static_cast<Real>(p_.dropout.keep_scale()),
                            factors_.data(), kStride);
    }
    kernels_.gradient_step({&terms, rows, keys, kStride, lse_.data() + row, deltas_ + row,
                            factors_.data(), weights_.data(), grads_.data(), slopes_.data()});
    // d loss / d dot, but for the scale: that is left to whoever stores the gradients.
    if (slopes_) {
      for (int64_t i = 0; i < rows.size() * kStride; ++i) slopes_[i] *= grads_[i];
    }
    if constexpr (kPacks) {
      const StridedMatrix<const Real> weights{weights_.data(), kStride, 1, rows.size(), columns};
      const StridedMatrix<const Real> dots{this->dots(), kStride, 1, rows.size(), columns};
      const StridedMatrix<const Real> lost{lost_.data(), kStride, 1, rows.size(), columns};
      kernels_.tile_to_right(weights, weights_right_.data(), kStride);
      kernels_.tile_rounding(weights, lost_.data());
      kernels_.tile_to_right(lost, weights_right_.data() + kTile, kStride);
      kernels_.tile_to_right(dots, dots_right_.data(), kStride);
      kernels_.tile_to_left(dots, dots_left_.data(), kLeftStride);
      kernels_.tile_rounding(dots, lost_.data());
      kernels_.tile_to_right(lost, dots_right_.data() + kTile, kStride);
      kernels_.tile_to_left(lost, dots_left_.data() + kLeftTile, kLeftStride);
    }
  }

  // grad_value_t (head_dim_v, block's keys), grad_key_t (head_dim, block's keys): += this tile's
  // part. Strides: keys_stride().
  void add_grad_value(Real* grad_value_t) const {
    for (int part = 0; part < kParts; ++part) {
      add_transposed(grad_out_t_.data(), p_.head_dim_v,
                     part_of(weights_right_, weights_.data(), part * kTile), grad_value_t);
    }
  }
  void add_grad_key(Real* grad_key_t) const {
    for (int part = 0; part < kParts; ++part) {
      add_transposed(queries_t_.data(), p_.head_dim, part_of(dots_right_, dots(), part * kTile),
                     grad_key_t);
    }
  }
  // grad_query (loaded rows, padded head_dim) += this tile's part.
  void add_grad_query(Real* grad_query, int64_t stride) const {
    const int64_t row = rows_.begin - loaded_rows_.begin;
    const int64_t key = keys_range_.begin - loaded_keys_.begin;
    for (int part = 0; part < kParts; ++part) {
      kernels_.multiply({rows_.size(), padded_columns(p_.head_dim), keys_range_.size(),
                         part_of(dots_left_, dots(), part * kLeftTile),
                         kPacks ? kLeftStride : kStride, key_ + key * key_stride_, key_stride_,
                         grad_query + row * stride, stride, Store::accumulate});
    }
  }

  int64_t keys_stride() const { return keys_stride_; }
  Range rows() const { return rows_; }
  Range keys() const { return keys_range_; }
  // (rows, keys), row stride kStride: d loss / d score.
  const Real* grad_scores() const { return grads_.data(); }

 private:
  // A part of a packed tile; where tiles are multiplied as they are, the tile.
  static const Operand* part_of(const Buffer<Operand>& packed, const Real* tile, int64_t offset) {
    if constexpr (kPacks) {
      return packed.data() + offset;
    } else {
      return tile;
    }
  }

  const Real* dots() const { return slopes_ ? slopes_.data() : grads_.data(); }

  // to (columns of left, keys) += left (.., queries) * tile (queries, keys)
  void add_transposed(const Operand* left, int64_t rows, const Operand* tile, Real* to) const {
    const int64_t row = rows_.begin - loaded_rows_.begin;
    const int64_t column = keys_range_.begin - loaded_keys_.begin;
    kernels_.multiply({rows, padded_columns(keys_range_.size()), rows_.size(), left + row,
                       kQueryStride, tile, kStride, to + column, keys_stride_, Store::accumulate});
  }

  const AttentionProblem& p_;
  const BackwardInputs& inputs_;
  const Microkernels<Element, Operand>& kernels_;
  MicrokernelUse<Element, Operand> use_;
  const int64_t keys_stride_, key_stride_, depth_, depth_v_;
  Range loaded_keys_{0, 0}, loaded_rows_{0, 0}, rows_{0, 0}, keys_range_{0, 0};
  const Real* deltas_ = nullptr;
  // Packed below, or in place.
  const Operand* key_ = nullptr;       // (block's keys, head_dim), right
  const Operand* query_ = nullptr;     // (queries, head_dim), left
  const Operand* grad_out_ = nullptr;  // (queries, head_dim_v), left
  Buffer<Operand> keys_;               // (block's keys, head_dim), right
  Buffer<Operand> keys_t_;             // (head_dim, block's keys), right
  Buffer<Operand> values_t_;           // (head_dim_v, block's keys), right
  Buffer<Operand> queries_;            // (queries, head_dim), left
  Buffer<Operand> queries_t_;          // (head_dim, queries), left
  Buffer<Operand> grad_outs_;          // (queries, head_dim_v), left
  Buffer<Operand> grad_out_t_;         // (head_dim_v, queries), left
  Buffer<LogSumExp<Real>> lse_;        // (queries)
  Buffer<Real> weights_;               // (queries, keys)
  Buffer<Real> grads_;                 // (queries, keys)
  Buffer<Real> slopes_;                // (queries, keys), with softcap only
  Buffer<Real> factors_;               // (queries, keys), with dropout only
  // Where tiles are packed:
  Buffer<Real> lost_;                                       // (queries, keys)
  Buffer<Operand> weights_right_, dots_left_, dots_right_;  // (kParts, queries, keys)
};

}  // namespace flashattn::cpu
