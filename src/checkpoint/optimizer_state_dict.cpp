#include "checkpoint/flatten.h"
#include "checkpoint/group_options.h"
#include "checkpoint/json_bytes.h"
#include "checkpoint/near_names.h"
#include "checkpoint/objects.h"
#include "checkpoint/optimizer_fields.h"
#include "checkpoint/optimizer_names.h"
#include "checkpoint/state_dict_tools.h"

#include <fsdp2/dtensor.h>
#include <fsdp2/state_dict.h>

#include <algorithm>
#include <map>

namespace fsdp2 {
namespace {

using dcp::Exchange;
using dcp::kGroups;
using dcp::kParams;
using dcp::kState;
using dcp::List;
using dcp::NamedGroup;
using dcp::OptimizerFields;
using dcp::StateDict;
using dcp::Value;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

/// A value for one parameter's state: laid out as the parameter if it has its size.
Value placed(const Value& value, const torch::Tensor& parameter) {
  if (!value.is_tensor() || !is_dtensor(parameter)) return value;
  const torch::Tensor& tensor = value.to_tensor();
  if (tensor.sizes() != parameter.sizes() || tensor.dim() == 0) return value;
  const DTensor like(parameter);
  if (!is_dtensor(tensor)) {
    return chunk_tensor(tensor.to(get_device()), like.device_mesh(), like.placements());
  }
  const DTensor given(tensor);
  if (given.device_mesh() == like.device_mesh() && given.placements() == like.placements()) {
    return value;
  }
  return chunk_tensor(given.full_tensor(), like.device_mesh(), like.placements());
}

/// Everything that a setter does, worked out and checked first.
class Setter {
 public:
  Setter(const torch::nn::Module& model, Optimizer& optimizer, const StateDictOptions& options)
      : optimizer_(optimizer),
        options_(options),
        fields_(OptimizerFields::of(optimizer)),
        groups_(dcp::named_groups(model, optimizer)) {}

  const std::vector<NamedGroup>& groups() const { return groups_; }

  void check(const StateDict& state) {
    given_.clear();
    for (const auto& [name, of_parameter] : state.at(kState).dict()) {
      TORCH_CHECK_VALUE(of_parameter.is_dict(), "the state of ", name, " must be a dict, got ",
                        of_parameter.kind());
    }
    for (const NamedGroup& group : groups_) {
      for (size_t i = 0; i < group.names.size(); ++i) {
        check_parameter(group.names[i], group.group->params()[i], *group.group,
                        state.at(kState).dict());
      }
      check_group(group, state.at(kGroups).items());
    }
  }

  /// Collective, where layouts differ.
  void apply(const StateDict& state) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const NamedGroup& group = groups_[g];
      if (const StateDict* given = given_[g]) set_group(group, *given);
      for (size_t i = 0; i < group.names.size(); ++i) {
        const Value* of_parameter = state.at(kState).dict().find(group.names[i]);
        if (of_parameter == nullptr) continue;
        const torch::Tensor& parameter = group.group->params()[i];
        StateDict values;
        for (const auto& [name, value] : of_parameter->dict()) {
          values[name] = placed(value, parameter);
        }
        optimizer_.state()[parameter.unsafeGetTensorImpl()] = fields_.make_state(values);
      }
    }
  }

 private:
  void check_parameter(const std::string& name, const torch::Tensor& parameter,
                       OptimizerParamGroup& group, const StateDict& states) const {
    const Value* state = states.find(name);
    const bool needed = parameter.requires_grad() && options_.strict &&
                        !fields_.fresh_state(torch::empty({0}), group.options()).empty();
    TORCH_CHECK_VALUE(state != nullptr || !needed, "the state dict has no state of ", name,
                      ", which requires gradients", dcp::near_names(name, states.keys()),
                      " (strict = false leaves it without)");
    if (state == nullptr) return;
    for (const auto& [field, value] : state->dict()) {
      if (!value.is_tensor() || value.to_tensor().dim() == 0) continue;
      TORCH_CHECK_VALUE(value.to_tensor().sizes() == parameter.sizes(), name, ": its ", field,
                        " has size ", value.to_tensor().sizes(), ", the parameter ",
                        parameter.sizes());
    }
  }
  void check_group(const NamedGroup& group, const std::vector<Value>& all) {
    given_.push_back(nullptr);
    for (const Value& candidate : all) {
      const auto& names = candidate.at(kParams).items();
      const bool ours = std::any_of(names.begin(), names.end(), [&](const Value& name) {
        return std::count(group.names.begin(), group.names.end(), name.to_string()) > 0;
      });
      if (!ours) continue;
      given_.back() = &candidate.dict();
      break;
    }
    const StateDict* given = given_.back();
    if (given == nullptr) {
      TORCH_CHECK_VALUE(!options_.strict || group.names.empty(), "no group of the state dict has ",
                        group.names.empty() ? "" : group.names[0],
                        " (strict = false leaves its options as they are)");
      return;
    }
    const StateDict have = fields_.options(optimizer_, group.group->options());
    for (const char* meaningful : {"maximize", "decoupled_weight_decay"}) {
      const Value *wanted = given->find(meaningful), *is = have.find(meaningful);
      if (wanted == nullptr || !wanted->is<bool>()) continue;
      TORCH_CHECK_VALUE(is == nullptr ? !wanted->to_bool() : is->to_bool() == wanted->to_bool(),
                        "the state dict is of an optimizer with ", meaningful, " = ",
                        wanted->to_bool() ? "true" : "false", ", which this one does not have");
    }
    const auto trial = group.group->options().clone();
    fields_.set_options(*trial, *given);  // throws if a value does not fit
  }

  void set_group(const NamedGroup& group, const StateDict& given) const {
    fields_.set_options(group.group->options(), given);
    StateDict others;
    for (const auto& [name, value] : given) {
      if (name != kParams && !fields_.has_option(name)) others[name] = value;
    }
    if (!group.names.empty()) dcp::keep_group_options(group.group->params()[0], std::move(others));
  }

  Optimizer& optimizer_;
  const StateDictOptions& options_;
  const OptimizerFields& fields_;
  std::vector<NamedGroup> groups_;
  std::vector<const StateDict*> given_;  // for each group, in the dict that was checked last
};

/// Rank 0's dict on all ranks; tensors of a parameter's size laid out as it. `check` runs on rank 0
/// before anything is sent. Collective.
StateDict receive(StateDict state, const std::vector<NamedGroup>& groups, const Exchange& exchange,
                  const std::function<void(const StateDict&)>& check) {
  using Json = nlohmann::json;
  const bool sends = exchange.rank() == 0;
  std::map<std::vector<dcp::PathPart>, torch::Tensor> tensors;
  const auto answers = exchange.all([&] {
    if (!sends) return std::string();
    check(state);
    Json items = Json::array();
    for (const dcp::Leaf& leaf : dcp::flatten(state)) {
      if (leaf.value->is_tensor()) {
        const torch::Tensor tensor = tensors[leaf.path] = leaf.value->to_tensor();
        items.push_back({dcp::json_of(leaf.path), static_cast<int>(tensor.scalar_type()),
                         tensor.sizes().vec()});
      } else {
        const std::string bytes = dcp::to_pickle(*leaf.value);
        items.push_back({dcp::json_of(leaf.path), Json::binary({bytes.begin(), bytes.end()})});
      }
    }
    return dcp::to_bytes(items);
  });

  std::map<std::string, torch::Tensor> parameters;
  for (const NamedGroup& group : groups) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      parameters[group.names[i]] = group.group->params()[i];
    }
  }
  Value received = StateDict{{kState, StateDict()}, {kGroups, List()}};
  for (const Json& item : Json::from_msgpack(answers[0])) {
    const std::vector<dcp::PathPart> path = dcp::path_of(item[0]);
    Value value;
    if (item[1].is_binary()) {
      const auto& bytes = item[1].get_binary();
      value = dcp::from_pickle({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    } else {
      value = dcp::from_rank_0(sends ? tensors.at(path) : torch::Tensor(),
                               static_cast<torch::ScalarType>(item[1].get<int>()),
                               item[2].get<std::vector<int64_t>>());
      const bool of_state = path.size() == 3 && path[0] == dcp::PathPart(kState);
      const auto parameter =
          of_state ? parameters.find(std::get<std::string>(path[1])) : parameters.end();
      if (parameter != parameters.end()) value = placed(value, parameter->second);
    }
    dcp::set_at(received, path, std::move(value));
  }
  return received.dict();
}

}  // namespace

dcp::StateDict get_optimizer_state_dict(const torch::nn::Module& model, Optimizer& optimizer,
                                        const StateDictOptions& options) {
  dcp::check_options(options);
  const OptimizerFields& fields = OptimizerFields::of(optimizer);
  StateDict states;
  List groups;
  for (const NamedGroup& named : dcp::named_groups(model, optimizer)) {
    OptimizerParamGroup& group = *named.group;
    StateDict of_group = fields.options(optimizer, group.options());
    if (!group.params().empty()) {
      for (const auto& [name, value] : dcp::kept_group_options(group.params()[0])) {
        of_group[name] = value;
      }
    }
    List names;
    for (size_t i = 0; i < named.names.size(); ++i) {
      const torch::Tensor& parameter = group.params()[i];
      if (options.ignore_frozen_params && !parameter.requires_grad()) continue;
      names.emplace_back(named.names[i]);
      const auto place = optimizer.state().find(parameter.unsafeGetTensorImpl());
      StateDict state;
      if (place != optimizer.state().end()) {
        state = fields.state(*place->second);
      } else if (parameter.requires_grad()) {
        state = fields.fresh_state(parameter, group.options());
      }
      if (!state.empty()) states[named.names[i]] = std::move(state);
    }
    of_group[kParams] = std::move(names);
    groups.emplace_back(std::move(of_group));
  }
  StateDict result = {{kState, std::move(states)}, {kGroups, std::move(groups)}};
  if (options.flatten_optimizer_state_dict) result = dcp::flattened(std::move(result));
  return dcp::finished(std::move(result), options);
}

void set_optimizer_state_dict(const torch::nn::Module& model, Optimizer& optimizer,
                              const dcp::StateDict& state, const StateDictOptions& options) {
  torch::NoGradGuard no_grad;
  dcp::check_options(options);
  const Exchange exchange(nullptr, "setting the optimizer's state");
  Setter setter(model, optimizer, options);
  StateDict whole;
  const auto prepare = [&] {
    whole = dcp::is_flattened(state) ? dcp::nested(state, setter.groups()) : state;
    TORCH_CHECK_VALUE(whole.contains(kState) && whole.contains(kGroups),
                      "a state dict of an optimizer has 'state' and 'param_groups'");
  };
  if (options.broadcast_from_rank0) {
    exchange.agree([&] {
      if (exchange.rank() == 0) prepare();
    });
    whole = receive(std::move(whole), setter.groups(), exchange,
                    [&](const StateDict& of_rank_0) { setter.check(of_rank_0); });
    exchange.agree([&] { setter.check(whole); });
  } else {
    exchange.agree([&] {
      prepare();
      setter.check(whole);
    });
  }
  setter.apply(whole);
}

std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(const torch::nn::Module& model,
                                                         Optimizer& optimizer,
                                                         const StateDictOptions& options) {
  return {get_model_state_dict(model, options),
          get_optimizer_state_dict(model, optimizer, options)};
}

IncompatibleKeys set_state_dict(torch::nn::Module& model, Optimizer& optimizer,
                                const dcp::StateDict& model_state,
                                const dcp::StateDict& optimizer_state,
                                const StateDictOptions& options) {
  IncompatibleKeys keys = set_model_state_dict(model, model_state, options);
  set_optimizer_state_dict(model, optimizer, optimizer_state, options);
  return keys;
}

}  // namespace fsdp2
