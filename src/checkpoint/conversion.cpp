#include "checkpoint/conversion.h"

#include <cmath>
#include <limits>

namespace fsdp2::dcp {
namespace {

/// What a dtype can tell apart.
struct Range {
  int digits = 0;   // binary, of the mantissa or of the integer
  int lowest = 0;   // exponent of the smallest number
  int highest = 0;  // of the largest
  bool is_signed = true;
};

bool is_integer(torch::ScalarType dtype) { return c10::isIntegralType(dtype, false); }

template <class T>
Range float_range() {
  using Limits = std::numeric_limits<T>;
  return {Limits::digits, Limits::min_exponent - Limits::digits, Limits::max_exponent, true};
}

Range range_of(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kFloat64:
      return float_range<double>();
    case torch::kFloat32:
      return float_range<float>();
    case torch::kFloat16:
      return float_range<c10::Half>();
    case torch::kBFloat16:
      return float_range<c10::BFloat16>();
    case torch::kFloat8_e5m2:
      return float_range<c10::Float8_e5m2>();
    case torch::kFloat8_e4m3fn:
      return float_range<c10::Float8_e4m3fn>();
    default:
      break;
  }
  if (dtype == torch::kBool) return {1, 0, 1, false};
  if (!is_integer(dtype)) return {1000, -100000, 100000, true};  // nothing is said to hold it
  const bool is_signed = c10::isSignedType(dtype);
  const int bits = static_cast<int>(c10::elementSize(dtype)) * 8 - (is_signed ? 1 : 0);
  return {bits, 0, bits, is_signed};
}

}  // namespace

Conversion conversion(torch::ScalarType from, torch::ScalarType to) {
  if (from == to) return Conversion::kNone;
  if (c10::isComplexType(from) && !c10::isComplexType(to)) return Conversion::kImpossible;
  const torch::ScalarType source = c10::toRealValueType(from), target = c10::toRealValueType(to);
  if (c10::isFloatingType(source) && !c10::isFloatingType(target)) return Conversion::kImpossible;
  if (target == torch::kBool) return Conversion::kImpossible;
  const Range a = range_of(source), b = range_of(target);
  const bool exact = a.digits <= b.digits && a.lowest >= b.lowest && a.highest <= b.highest &&
                     (b.is_signed || !a.is_signed);
  if (source == target || exact) return Conversion::kExact;
  return is_integer(target) ? Conversion::kImpossible : Conversion::kRounding;
}

}  // namespace fsdp2::dcp
