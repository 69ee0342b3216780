#pragma once

#include <torch/types.h>

#include <vector>

namespace fsdp2::comm {

/// out = parts[0] + parts[1] + ..., in this order; 16-bit floats are added in float32 and rounded
/// once. Flat tensors of one dtype and size, at least two parts.
void add_up(const at::Tensor& out, const std::vector<at::Tensor>& parts);

}  // namespace fsdp2::comm
