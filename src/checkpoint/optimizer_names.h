#pragma once

// An optimizer's parameters by the names they have in the model, and the two forms of its state
// dict.

#include <fsdp2/dcp_value.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace fsdp2::dcp {

constexpr const char *kState = "state", *kGroups = "param_groups", *kParams = "params";

struct NamedGroup {
  torch::optim::OptimizerParamGroup* group;
  std::vector<std::string> names;  // of group->params()
};

/// Error if the optimizer has a parameter that the model does not have.
std::vector<NamedGroup> named_groups(const torch::nn::Module& model,
                                     torch::optim::Optimizer& optimizer);

/// "state.a.weight.step", "param_groups.a.weight.lr".
StateDict flattened(StateDict nested);
/// The other way round.
StateDict nested(const StateDict& flat, const std::vector<NamedGroup>& groups);
bool is_flattened(const StateDict& state);

}  // namespace fsdp2::dcp
