#include "comm/shm_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

namespace fsdp2::comm {
namespace {

using Op = c10d::ReduceOp::RedOpType;
using Inputs = c10::ArrayRef<const std::byte*>;

// Loops below are compiled twice where the compiler can: for any machine, and for AVX2.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define FSDP2_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define FSDP2_CLONES
#endif

inline float widened(c10::BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16U);
}
/// To nearest, ties to even; the branch-free form of c10's.
inline c10::BFloat16 rounded(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t near = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  const uint32_t not_a_number = 0x7FC0U;
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return {static_cast<uint16_t>(is_nan ? not_a_number : near), c10::BFloat16::from_bits()};
}

// Elements at a time: the sums stay in the nearest cache.
constexpr int64_t kTile = 1024;

/// sums = first + second.
template <class T, class Sum>
inline __attribute__((always_inline)) void add_tile(Sum* sums, const T* first, const T* second,
                                                    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      sums[i] = widened(first[i]) + widened(second[i]);
    } else {
      sums[i] = static_cast<Sum>(first[i]) + static_cast<Sum>(second[i]);
    }
  }
}
template <class T, class Sum>
inline __attribute__((always_inline)) void add_tile(Sum* sums, const T* next, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      sums[i] += widened(next[i]);
    } else {
      sums[i] += static_cast<Sum>(next[i]);
    }
  }
}
template <class T, class Sum>
inline __attribute__((always_inline)) void put_tile(T* output, const Sum* sums, int64_t count,
                                                    Sum divisor) {
  if (divisor != 1) {
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        output[i] = rounded(sums[i] / divisor);
      } else {
        output[i] = static_cast<T>(sums[i] / divisor);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      output[i] = rounded(sums[i]);
    } else {
      output[i] = static_cast<T>(sums[i]);
    }
  }
}

template <class T, class Sum>
inline __attribute__((always_inline)) void sum(T* output, Inputs inputs, int64_t count,
                                               Sum divisor) {
  const auto at = [&](size_t rank, int64_t offset) {
    return reinterpret_cast<const T*>(inputs[rank]) + offset;
  };
  alignas(64) std::array<Sum, kTile> sums;
  for (int64_t offset = 0; offset < count; offset += kTile) {
    const int64_t now = std::min(kTile, count - offset);
    add_tile(sums.data(), at(0, offset), at(1, offset), now);
    for (size_t rank = 2; rank < inputs.size(); ++rank)
      add_tile(sums.data(), at(rank, offset), now);
    put_tile(output + offset, sums.data(), now, divisor);
  }
}

FSDP2_CLONES void sum_float(float* output, Inputs inputs, int64_t count, float divisor) {
  sum(output, inputs, count, divisor);
}
FSDP2_CLONES void sum_double(double* output, Inputs inputs, int64_t count, double divisor) {
  sum(output, inputs, count, divisor);
}
FSDP2_CLONES void sum_bfloat16(c10::BFloat16* output, Inputs inputs, int64_t count, float divisor) {
  sum(output, inputs, count, divisor);
}
FSDP2_CLONES void sum_half(c10::Half* output, Inputs inputs, int64_t count, float divisor) {
  sum(output, inputs, count, divisor);
}

/// Whether there is a loop for it, which has then run.
bool sum_plainly(std::byte* output, Inputs inputs, int64_t bytes, c10::ScalarType type,
                 double divisor) {
  if (inputs.size() < 2) return false;
  const auto run = [&](auto function, auto* typed, auto typed_divisor) {
    function(typed, inputs, bytes / static_cast<int64_t>(sizeof *typed), typed_divisor);
    return true;
  };
  switch (type) {
    case c10::kFloat:
      return run(sum_float, reinterpret_cast<float*>(output), static_cast<float>(divisor));
    case c10::kDouble:
      return run(sum_double, reinterpret_cast<double*>(output), divisor);
    case c10::kBFloat16:
      return run(sum_bfloat16, reinterpret_cast<c10::BFloat16*>(output),
                 static_cast<float>(divisor));
    case c10::kHalf:
      return run(sum_half, reinterpret_cast<c10::Half*>(output), static_cast<float>(divisor));
    case c10::kComplexFloat:
      return run(sum_float, reinterpret_cast<float*>(output), static_cast<float>(divisor));
    case c10::kComplexDouble:
      return run(sum_double, reinterpret_cast<double*>(output), divisor);
    default:
      return false;
  }
}

at::Tensor combined(const at::Tensor& so_far, const at::Tensor& next, Op op) {
  switch (op) {
    case Op::SUM:
    case Op::AVG:
    case Op::PREMUL_SUM:  // each rank has multiplied what it sends
      return so_far.add(next);
    case Op::PRODUCT:
      return so_far.mul(next);
    case Op::MIN:
      return at::minimum(so_far, next);
    case Op::MAX:
      return at::maximum(so_far, next);
    case Op::BAND:
      return at::bitwise_and(so_far, next);
    case Op::BOR:
      return at::bitwise_or(so_far, next);
    case Op::BXOR:
      return at::bitwise_xor(so_far, next);
    default:
      TORCH_CHECK(false, "shm: unknown reduction ", static_cast<int>(op));
  }
}

}  // namespace

std::string why_not_reducible(c10::ScalarType type, Op op) {
  const bool bits = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  const bool ordered = op == Op::MIN || op == Op::MAX;
  const char* why = nullptr;
  if (op >= Op::UNUSED) why = "is not known";
  if (c10::isQIntType(type) || c10::isBitsType(type)) why = "is not defined for this dtype";
  if (bits && !c10::isIntegralType(type, true)) why = "is for integers and booleans";
  if (ordered && c10::isComplexType(type)) why = "needs numbers that have an order";
  if ((op == Op::AVG || op == Op::PREMUL_SUM) && c10::isIntegralType(type, true))
    why = "of integers is not whole: use a floating dtype, or SUM";
  if (!why) return {};
  static constexpr std::array kNames = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                        "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  const auto index = static_cast<size_t>(op);
  return c10::str("the reduction ", index < kNames.size() ? kNames.at(index) : "?", " of ",
                  c10::toString(type), " cannot be made: it ", why);
}

void shm_reduce(std::byte* output, Inputs inputs, int64_t bytes, c10::ScalarType type, Op op) {
  if (bytes == 0) return;
  const bool sums = op == Op::SUM || op == Op::AVG || op == Op::PREMUL_SUM;
  const double divisor = op == Op::AVG ? static_cast<double>(inputs.size()) : 1;
  if (sums && sum_plainly(output, inputs, bytes, type, divisor)) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto whole = [&](const std::byte* data) {
    const int64_t count = bytes / static_cast<int64_t>(c10::elementSize(type));
    return at::from_blob(const_cast<std::byte*>(data), {count}, at::TensorOptions().dtype(type));
  };
  const bool widens = c10::isFloatingType(type) && c10::elementSize(type) < 4;
  const auto input = [&](size_t rank) {
    return widens ? whole(inputs[rank]).to(at::kFloat) : whole(inputs[rank]);
  };
  at::Tensor result = input(0);
  for (size_t rank = 1; rank < inputs.size(); ++rank) result = combined(result, input(rank), op);
  if (divisor != 1) result = result.div(divisor);
  const at::Tensor to = whole(output);
  if (!to.is_alias_of(result) || output != inputs[0] || inputs.size() > 1) to.copy_(result);
}

}  // namespace fsdp2::comm
