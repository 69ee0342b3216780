#include "comm/half_format.h"

#include <c10/util/Half.h>

#include <bit>

#if defined(__x86_64__) && defined(__GNUC__)
#define FSDP2_HAS_AVX2 1
#include <immintrin.h>
#endif

namespace fsdp2::comm {
namespace {

#define FSDP2_INLINE inline __attribute__((always_inline))

FSDP2_INLINE void widen_bfloat16_here(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16U);
}
FSDP2_INLINE void add_bfloat16_here(const uint16_t* from, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    sums[i] += std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16U);
}
FSDP2_INLINE void narrow_bfloat16_here(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    to[i] = static_cast<uint16_t>(is_nan ? 0x7FC0U : nearest);
  }
}

void widen_bfloat16(const uint16_t* from, float* to, int64_t count) {
  widen_bfloat16_here(from, to, count);
}
void add_bfloat16(const uint16_t* from, float* sums, int64_t count) {
  add_bfloat16_here(from, sums, count);
}
void narrow_bfloat16(const float* from, uint16_t* to, int64_t count) {
  narrow_bfloat16_here(from, to, count);
}
void widen_float16(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = c10::detail::fp16_ieee_to_fp32_value(from[i]);
}
void add_float16(const uint16_t* from, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += c10::detail::fp16_ieee_to_fp32_value(from[i]);
}
void narrow_float16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = c10::detail::fp16_ieee_from_fp32_value(from[i]);
}

#ifdef FSDP2_HAS_AVX2
#define FSDP2_AVX2 __attribute__((target("avx2,f16c")))

FSDP2_AVX2 void widen_bfloat16_avx2(const uint16_t* from, float* to, int64_t count) {
  widen_bfloat16_here(from, to, count);
}
FSDP2_AVX2 void add_bfloat16_avx2(const uint16_t* from, float* sums, int64_t count) {
  add_bfloat16_here(from, sums, count);
}
FSDP2_AVX2 void narrow_bfloat16_avx2(const float* from, uint16_t* to, int64_t count) {
  narrow_bfloat16_here(from, to, count);
}
FSDP2_AVX2 void widen_float16_avx2(const uint16_t* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
  }
  widen_float16(from + i, to + i, count - i);
}
FSDP2_AVX2 void add_float16_avx2(const uint16_t* from, float* sums, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), _mm256_cvtph_ps(eight)));
  }
  add_float16(from + i, sums + i, count - i);
}
FSDP2_AVX2 void narrow_float16_avx2(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
  narrow_float16(from + i, to + i, count - i);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#endif

}  // namespace

const HalfFormat& bfloat16_format() {
  static const HalfFormat plain = {widen_bfloat16, add_bfloat16, narrow_bfloat16};
#ifdef FSDP2_HAS_AVX2
  static const HalfFormat fast = {widen_bfloat16_avx2, add_bfloat16_avx2, narrow_bfloat16_avx2};
  static const bool is_fast = has_avx2();
  if (is_fast) return fast;
#endif
  return plain;
}

const HalfFormat& float16_format() {
  static const HalfFormat plain = {widen_float16, add_float16, narrow_float16};
#ifdef FSDP2_HAS_AVX2
  static const HalfFormat fast = {widen_float16_avx2, add_float16_avx2, narrow_float16_avx2};
  static const bool is_fast = has_avx2();
  if (is_fast) return fast;
#endif
  return plain;
}

}  // namespace fsdp2::comm
