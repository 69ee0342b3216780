#pragma once

// The names that torch and its files give to dtypes.

#include <torch/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace fsdp2::dcp {

/// "float32", as in torch.float32. Error if torch has no name for it, naming `key`.
std::string dtype_name(torch::ScalarType dtype, const std::string& key = {});
/// The other way round; nothing if torch has no such dtype.
std::optional<torch::ScalarType> dtype_named(std::string_view name);
/// "FloatStorage"; "" for younger dtypes, whose bytes lie in an UntypedStorage.
std::string storage_class(torch::ScalarType dtype);
std::optional<torch::ScalarType> dtype_of_storage(std::string_view storage_class);

}  // namespace fsdp2::dcp
