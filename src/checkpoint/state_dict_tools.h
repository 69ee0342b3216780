#pragma once

// What getters and setters of state dicts share.

#include "checkpoint/exchange.h"

#include <fsdp2/dcp_value.h>
#include <fsdp2/state_dict.h>

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace fsdp2::dcp {

/// Applies full_state_dict and cpu_offload to every tensor of a dict, one by one. Collective if
/// full.
StateDict finished(StateDict state, const StateDictOptions& options);

/// Rank 0's tensor on every rank, on the device of the group; others pass nothing but its dtype and
/// sizes. Collective.
torch::Tensor from_rank_0(const torch::Tensor& tensor, torch::ScalarType dtype,
                          const std::vector<int64_t>& sizes);

/// A model's parameters by their handles: the first name each has.
std::unordered_map<const void*, std::string> names_of(const torch::nn::Module& model);

void check_options(const StateDictOptions& options);

}  // namespace fsdp2::dcp
