// Where each sequence lives: dense batches, padded batches (key lengths) and packed batches
// (cumulative offsets, optionally only partly used) all answer the same question.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flashattn {

// int32 or int64 numbers on the inputs' device.
struct IntegerList {
  const int32_t* as_int32 = nullptr;
  const int64_t* as_int64 = nullptr;
  int64_t stride = 1;

  FLASHATTN_HD int64_t operator[](int64_t i) const {
    return as_int64 ? as_int64[i * stride] : static_cast<int64_t>(as_int32[i * stride]);
  }
  FLASHATTN_HD explicit operator bool() const { return as_int32 || as_int64; }
};

struct Sequence {
  int64_t q_begin;  // first row of the sequence in the storage of query and out
  int64_t len_q;    // rows in use
  int64_t k_begin;  // first row of the sequence in the storage of key and value
  int64_t len_k;    // keys in use
};

struct Sequences {
  int64_t count = 0;      // batch, or the number of packed sequences
  int64_t storage_q = 0;  // rows of query's storage: len_q when dense, total_q when packed
  int64_t storage_k = 0;  // rows of key's storage: len_k when dense, total_k when packed
  int64_t max_len_q = 0;  // no sequence is longer
  int64_t max_len_k = 0;
  IntegerList cu_q, cu_k;      // (count + 1), packed only
  IntegerList used_q, used_k;  // (count), packed only, optional
  IntegerList key_lengths;     // (count), dense only, optional

  FLASHATTN_HD bool packed() const { return static_cast<bool>(cu_q); }

  // Lengths and offsets are clamped, so that nothing outside the tensors is ever reached,
  // whatever the lists hold.
  FLASHATTN_HD Sequence operator[](int64_t sequence) const {
    if (!packed()) {
      const int64_t len_k = key_lengths ? clamp(key_lengths[sequence], 0, storage_k) : storage_k;
      return {0, storage_q, 0, len_k};
    }
    const Span q = span(cu_q, used_q, sequence, storage_q, max_len_q);
    const Span k = span(cu_k, used_k, sequence, storage_k, max_len_k);
    return {q.begin, q.length, k.begin, k.length};
  }

 private:
  struct Span {
    int64_t begin, length;
  };

  FLASHATTN_HD static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    value = value > high ? high : value;
    return value < low ? low : value;  // low wins, so a length is never negative
  }

  FLASHATTN_HD static Span span(const IntegerList& cu, const IntegerList& used, int64_t sequence,
                                int64_t storage, int64_t max_length) {
    const int64_t begin = clamp(cu[sequence], 0, storage);
    const int64_t end = clamp(cu[sequence + 1], begin, storage);
    int64_t length = clamp(end - begin, 0, max_length);
    if (used) length = clamp(used[sequence], 0, length);
    return {begin, length};
  }
};

}  // namespace flashattn
