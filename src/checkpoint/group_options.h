#pragma once

// Options of optimizer groups that C++ has no place for, kept from a load to the next save.

#include <fsdp2/dcp_value.h>

#include <torch/types.h>

namespace fsdp2::dcp {

/// Of the group whose first parameter this is; as long as that lives. Thread-safe.
void keep_group_options(const torch::Tensor& first_parameter, StateDict options);
StateDict kept_group_options(const torch::Tensor& first_parameter);

}  // namespace fsdp2::dcp
