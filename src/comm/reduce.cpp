#include "comm/reduce.h"

#include "comm/half_format.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>

namespace fsdp2::comm {
namespace {

using Op = c10d::ReduceOp::RedOpType;
using Inputs = c10::ArrayRef<const std::byte*>;

// Elements at a time: the sums stay in the nearest cache.
constexpr int64_t kTile = 1024;
// Elements that are worth a thread.
constexpr int64_t kShare = 32 * kTile;

template <class T>
void add_floats(std::byte* output, Inputs inputs, int64_t count, T divisor) {
  const auto input = [&](size_t rank, int64_t offset) {
    return reinterpret_cast<const T*>(inputs[rank]) + offset;
  };
  alignas(64) std::array<T, kTile> sums;
  for (int64_t offset = 0; offset < count; offset += kTile) {
    const int64_t now = std::min(kTile, count - offset);
    const T* first = input(0, offset);
    const T* second = input(1, offset);
    for (int64_t i = 0; i < now; ++i) sums[i] = first[i] + second[i];
    for (size_t rank = 2; rank < inputs.size(); ++rank) {
      const T* next = input(rank, offset);
      for (int64_t i = 0; i < now; ++i) sums[i] += next[i];
    }
    if (divisor != 1) {
      for (int64_t i = 0; i < now; ++i) sums[i] /= divisor;
    }
    std::copy_n(sums.data(), now, reinterpret_cast<T*>(output) + offset);
  }
}

void add_halves(std::byte* output, Inputs inputs, int64_t count, float divisor,
                const HalfFormat& format) {
  const auto input = [&](size_t rank, int64_t offset) {
    return reinterpret_cast<const uint16_t*>(inputs[rank]) + offset;
  };
  alignas(64) std::array<float, kTile> sums;
  for (int64_t offset = 0; offset < count; offset += kTile) {
    const int64_t now = std::min(kTile, count - offset);
    format.widen(input(0, offset), sums.data(), now);
    for (size_t rank = 1; rank < inputs.size(); ++rank)
      format.add(input(rank, offset), sums.data(), now);
    if (divisor != 1) {
      for (int64_t i = 0; i < now; ++i) sums[i] /= divisor;
    }
    format.narrow(sums.data(), reinterpret_cast<uint16_t*>(output) + offset, now);
  }
}

/// Whether there is a loop for it, which has then run.
bool sum_plainly(std::byte* output, Inputs inputs, int64_t bytes, c10::ScalarType type,
                 double divisor) {
  if (inputs.size() < 2) return false;
  switch (type) {
    case c10::kFloat:
    case c10::kComplexFloat:
      add_floats(output, inputs, bytes / 4, static_cast<float>(divisor));
      return true;
    case c10::kDouble:
    case c10::kComplexDouble:
      add_floats(output, inputs, bytes / 8, divisor);
      return true;
    case c10::kBFloat16:
    case c10::kHalf:
      add_halves(output, inputs, bytes / 2, static_cast<float>(divisor),
                 type == c10::kHalf ? float16_format() : bfloat16_format());
      return true;
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

/// `divisor`: of a sum.
void reduce(std::byte* output, Inputs inputs, int64_t bytes, c10::ScalarType type, Op op,
            double divisor) {
  if (bytes == 0) return;
  const bool sums = op == Op::SUM || op == Op::AVG || op == Op::PREMUL_SUM;
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
  whole(output).copy_(result);
}

}  // namespace

const char* name_of_reduction(Op op) {
  static constexpr std::array names = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                       "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  const auto index = static_cast<size_t>(op);
  return index < names.size() ? names.at(index) : "unknown";
}

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
  return c10::str("the reduction ", name_of_reduction(op), " of ", c10::toString(type),
                  " cannot be made: it ", why);
}

void reduce_in_order(std::byte* output, Inputs inputs, int64_t bytes, c10::ScalarType type, Op op,
                     int64_t ranks) {
  const double averaged =
      ranks > 0 ? static_cast<double>(ranks) : static_cast<double>(inputs.size());
  reduce(output, inputs, bytes, type, op, op == Op::AVG ? averaged : 1);
}

void add_up(std::byte* out, Inputs parts, int64_t numel, c10::ScalarType type, double divisor) {
  const auto size = static_cast<int64_t>(c10::elementSize(type));
  at::parallel_for(0, numel, kShare, [&](int64_t from, int64_t end) {
    c10::SmallVector<const std::byte*, 8> inputs;
    for (const std::byte* part : parts) inputs.push_back(part + from * size);
    reduce(out + from * size, inputs, (end - from) * size, type, Op::SUM, divisor);
  });
}

}  // namespace fsdp2::comm
