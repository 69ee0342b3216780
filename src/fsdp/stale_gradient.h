#pragma once

// Whoever still holds a member as if it were the parameter (an optimizer made before wrapping)
// would find no gradient and silently do nothing. It finds one whose use is an error.

#include "fsdp/param_group.h"

#include <memory>

namespace fsdp2::fsdp {

/// A gradient that cannot be read.
torch::Tensor stale_gradient(const ParamLayout& layout, c10::Device device);
bool is_stale(const torch::Tensor& gradient);
/// Takes it away before the next accumulation.
void clear_stale_gradient_before_accumulation(const torch::Tensor& member);

}  // namespace fsdp2::fsdp
