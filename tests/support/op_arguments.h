#pragma once

// Arguments for any op, from its schema alone.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

namespace fsdp2::testing {

/// Where one tensor sits among the arguments: argument, and element if that is a list.
struct Slot {
  size_t argument;
  int element = -1;
};

/// One way to fill the arguments of any schema.
struct Filling {
  int tensors = 0;  // which shapes and dtypes
  int64_t integer = 0;
  std::vector<int64_t> integers;
};

/// Filling::tensors is below it. Real and complex, bfloat16 and integer, 0 to 5 dimensions.
constexpr int kTensorFillings = 16;

/// Arguments for `schema`, and where their tensors are. Nothing if they cannot be made.
std::optional<std::pair<std::vector<c10::IValue>, std::vector<Slot>>> fill_arguments(
    const c10::FunctionSchema& schema, const Filling& filling);

}  // namespace fsdp2::testing
