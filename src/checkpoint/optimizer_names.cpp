#include "checkpoint/optimizer_names.h"

#include "checkpoint/flatten.h"
#include "checkpoint/state_dict_tools.h"

#include <c10/util/Exception.h>

namespace fsdp2::dcp {
namespace {

List list_of(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

/// What `flat` has below "prefix.name.".
StateDict below(const StateDict& flat, const std::string& prefix, const std::string& name) {
  const std::string start = prefix + "." + name + ".";
  StateDict found;
  for (const auto& [key, value] : flat) {
    if (key.starts_with(start)) found[key.substr(start.size())] = value;
  }
  return found;
}

}  // namespace

std::vector<NamedGroup> named_groups(const torch::nn::Module& model,
                                     torch::optim::Optimizer& optimizer) {
  const auto names = names_of(model);
  std::vector<NamedGroup> groups;
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    NamedGroup named{&group, {}};
    for (const torch::Tensor& parameter : group.params()) {
      const auto place = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(place != names.end(), "parameter ", named.names.size(), " of group ",
                        groups.size(), " of the optimizer, of size ", parameter.sizes(),
                        ", is not a parameter of the model: make the optimizer after fully_shard, "
                        "from model->parameters()");
      named.names.push_back(place->second);
    }
    groups.push_back(std::move(named));
  }
  return groups;
}

StateDict flattened(StateDict nested) {
  StateDict flat;
  for (const Leaf& leaf : flatten(nested[kState].dict())) {
    flat[std::string(kState) + "." + leaf.key] = *leaf.value;
  }
  for (const Value& group : nested[kGroups].items()) {
    for (const Value& name : group.at(kParams).items()) {
      for (const auto& [option, value] : group.dict()) {
        if (option == kParams) continue;
        flat[std::string(kGroups) + "." + name.to_string() + "." + option] = value;
      }
    }
  }
  return flat;
}

StateDict nested(const StateDict& flat, const std::vector<NamedGroup>& groups) {
  StateDict result = {{kState, StateDict()}, {kGroups, List()}};
  List of_groups;
  for (const NamedGroup& group : groups) {
    StateDict options;
    std::vector<std::string> present;
    for (const std::string& name : group.names) {
      if (StateDict state = below(flat, kState, name); !state.empty()) {
        result[kState][name] = std::move(state);
      }
      StateDict of_name = below(flat, kGroups, name);
      if (of_name.empty()) continue;
      present.push_back(name);
      if (options.empty()) options = std::move(of_name);
    }
    options[kParams] = list_of(present);
    of_groups.emplace_back(std::move(options));
  }
  result[kGroups] = std::move(of_groups);
  return result;
}

bool is_flattened(const StateDict& state) { return !state.empty() && !state.contains(kState); }

}  // namespace fsdp2::dcp
