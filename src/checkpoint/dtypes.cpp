#include "checkpoint/dtypes.h"

namespace fsdp2::dcp {
namespace {

struct Names {
  torch::ScalarType dtype;
  const char* name;
  const char* storage;
};

constexpr Names kNames[] = {
    {c10::ScalarType::Byte, "uint8", "ByteStorage"},
    {c10::ScalarType::Char, "int8", "CharStorage"},
    {c10::ScalarType::Short, "int16", "ShortStorage"},
    {c10::ScalarType::Int, "int32", "IntStorage"},
    {c10::ScalarType::Long, "int64", "LongStorage"},
    {c10::ScalarType::Half, "float16", "HalfStorage"},
    {c10::ScalarType::Float, "float32", "FloatStorage"},
    {c10::ScalarType::Double, "float64", "DoubleStorage"},
    {c10::ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    {c10::ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    {c10::ScalarType::Bool, "bool", "BoolStorage"},
    {c10::ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    {c10::ScalarType::ComplexHalf, "complex32", ""},
    {c10::ScalarType::Float8_e5m2, "float8_e5m2", ""},
    {c10::ScalarType::Float8_e4m3fn, "float8_e4m3fn", ""},
    {c10::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", ""},
    {c10::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", ""},
    {c10::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", ""},
    {c10::ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", ""},
    {c10::ScalarType::UInt16, "uint16", ""},
    {c10::ScalarType::UInt32, "uint32", ""},
    {c10::ScalarType::UInt64, "uint64", ""},
};

const Names* names_of(torch::ScalarType dtype) {
  for (const Names& names : kNames) {
    if (names.dtype == dtype) return &names;
  }
  return nullptr;
}

}  // namespace

std::string dtype_name(torch::ScalarType dtype, const std::string& key) {
  const Names* names = names_of(dtype);
  TORCH_CHECK_TYPE(names != nullptr, key, key.empty() ? "" : ": ", "a tensor of dtype ", dtype,
                   " cannot be saved");
  return names->name;
}

std::optional<torch::ScalarType> dtype_named(std::string_view name) {
  for (const Names& names : kNames) {
    if (name == names.name) return names.dtype;
  }
  return std::nullopt;
}

std::string storage_class(torch::ScalarType dtype) {
  const Names* names = names_of(dtype);
  return names == nullptr ? "" : names->storage;
}

std::optional<torch::ScalarType> dtype_of_storage(std::string_view storage_class) {
  if (storage_class.empty()) return std::nullopt;
  for (const Names& names : kNames) {
    if (storage_class == names.storage) return names.dtype;
  }
  return std::nullopt;
}

}  // namespace fsdp2::dcp
