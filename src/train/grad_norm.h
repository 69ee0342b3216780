#pragma once

#include <torch/types.h>

#include <vector>

namespace fsdp2::train {

/// The L2 norm of all gradients, plain or sharded, before they are scaled down to at most `clip`
/// (0: left alone). Collective if they are sharded.
double clip_grads(const std::vector<torch::Tensor>& parameters, double clip);

}  // namespace fsdp2::train
