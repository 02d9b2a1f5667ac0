// What this machine's processor can do at most: multiply-adds that never leave the registers, and
// its clock. benchmarks/roofline.py compiles it with -march=native and calls it on every thread.
#include <cstdint>

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {
typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
constexpr int kLanes = VECTOR_BYTES / 4;
constexpr int kChains = 12;  // independent, more than latency times ports
volatile float sink;         // what is computed is used
}  // namespace

extern "C" {

// Runs `count` steps and returns how many floating-point operations they were.
double flops_fp32(int64_t count) {
  Vector sums[kChains], factor, term;
  for (int lane = 0; lane < kLanes; ++lane) factor[lane] = 0.999f, term[lane] = 1e-3f;
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = factor * float(chain);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; ++chain) {
      sums[chain] = sums[chain] * factor + term;
    }
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] += sums[chain];
  sink = sums[0][0];
  return 2.0 * kLanes * kChains * static_cast<double>(count);
}

#if defined(__AMX_BF16__)
const char* unit_bf16() { return "AMX-BF16"; }

double flops_bf16(int64_t count) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  _tile_loadconfig(&shapes);
  for (int64_t i = 0; i < count; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(count);
}
#elif defined(__AVX512BF16__)
const char* unit_bf16() { return "AVX-512-BF16"; }

double flops_bf16(int64_t count) {
  __m512 sums[kChains];
  __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; ++chain) {
      sums[chain] = _mm512_dpbf16_ps(sums[chain], ones, ones);
    }
  }
  for (auto& sum : sums) sink = _mm512_cvtss_f32(sum);
  return 4.0 * 16 * kChains * static_cast<double>(count);
}
#else
const char* unit_bf16() { return "fp32 multiply-add"; }

double flops_bf16(int64_t count) { return flops_fp32(count); }
#endif

// Dependent multiplications of integers, three cycles each on every x86-64 of the last decade:
// returns how many cycles. (Additions would not do: some processors add constants ahead of time.)
double cycles(int64_t count) {
  uint64_t x = 1;
  for (int64_t i = 0; i < count; ++i) {
    asm volatile("imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0" : "+r"(x));
  }
  return 12.0 * static_cast<double>(count);
}

}  // extern "C"
