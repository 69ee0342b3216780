#pragma once

// Initial weights from a counter: element i of a parameter depends on its name, the seed and i
// only, so that any rank can make any part alone and a run starts from the same weights at every
// world size.

#include <torch/nn/module.h>

#include <string>

namespace fsdp2::train {

/// `count` elements of parameter `name` from row-major flat index `start` on. Uniform with standard
/// deviation 0.02; projections back into the residual stream (wo, w2) are smaller by sqrt(2 *
/// layers); norm weights are 1.
torch::Tensor init_values(const std::string& name, uint64_t seed, int64_t start, int64_t count,
                          int64_t layers);

/// Fills all parameters of a module that is not sharded yet.
void init_weights(torch::nn::Module& module, uint64_t seed, int64_t layers);

}  // namespace fsdp2::train
