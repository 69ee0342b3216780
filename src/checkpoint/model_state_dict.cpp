#include "checkpoint/blocks.h"
#include "checkpoint/flatten.h"
#include "checkpoint/near_names.h"
#include "checkpoint/state_dict_tools.h"

#include <fsdp2/dtensor.h>
#include <fsdp2/state_dict.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace fsdp2 {
namespace {

using dcp::Exchange;
using dcp::StateDict;
using dcp::Value;
using Json = nlohmann::json;

/// The model's tensors under the names that the options give them.
class Selection {
 public:
  Selection(const torch::nn::Module& model, const StateDictOptions& options) : options_(options) {
    dcp::check_options(options);
    for (const auto& item : model.named_parameters()) add(item.key(), item.value());
    for (const auto& item : model.named_buffers()) add(item.key(), item.value());
    for (const std::string& submodule : options.submodules) {
      TORCH_CHECK_VALUE(std::count(used_.begin(), used_.end(), submodule) > 0,
                        "the model has no parameters or buffers below ", submodule,
                        dcp::near_names(submodule, names_));
    }
  }

  struct Item {
    std::string name;
    torch::Tensor tensor;
    bool optional;  // a frozen parameter that is not asked for
  };
  std::vector<Item> items;

 private:
  void add(const std::string& name, const torch::Tensor& tensor) {
    if (!tensor.defined()) return;
    names_.push_back(name.substr(0, name.rfind('.')));
    std::string shown = name;
    if (!options_.submodules.empty()) {
      const auto in = std::find_if(options_.submodules.begin(), options_.submodules.end(),
                                   [&](const auto& prefix) { return dcp::is_below(name, prefix); });
      if (in == options_.submodules.end()) return;
      used_.push_back(*in);
      if (!options_.keep_submodule_prefixes) shown = name.substr(in->size() + 1);
    }
    items.push_back({std::move(shown), tensor, false});
  }

  const StateDictOptions& options_;
  std::vector<std::string> names_, used_;
};

void mark_frozen(Selection& selection, const torch::nn::Module& model) {
  std::unordered_set<const void*> frozen;
  for (const torch::Tensor& parameter : model.parameters()) {
    if (!parameter.requires_grad()) frozen.insert(parameter.unsafeGetTensorImpl());
  }
  for (auto& item : selection.items) {
    item.optional = frozen.count(item.tensor.unsafeGetTensorImpl()) > 0;
  }
}

Selection select(const torch::nn::Module& model, const StateDictOptions& options) {
  Selection selection(model, options);
  if (options.ignore_frozen_params) mark_frozen(selection, model);
  return selection;
}

/// What of a dict goes where; throws before anything is written.
struct Assignments {
  IncompatibleKeys incompatible;
  std::vector<size_t> items;  // of the selection, that have a value
};

Assignments check_state(const Selection& selection, const StateDict& state,
                        const StateDictOptions& options) {
  Assignments found;
  std::vector<std::string> names;
  for (size_t i = 0; i < selection.items.size(); ++i) {
    const auto& [name, tensor, optional] = selection.items[i];
    names.push_back(name);
    const Value* value = state.find(name);
    if (value == nullptr) {
      if (!optional) found.incompatible.missing_keys.push_back(name);
      continue;
    }
    TORCH_CHECK_VALUE(value->is_tensor() && value->to_tensor().defined(), name,
                      " must be a tensor, got ", value->kind());
    const torch::Tensor& given = value->to_tensor();
    TORCH_CHECK_VALUE(given.sizes() == tensor.sizes(), name, ": its size is ", tensor.sizes(),
                      " in the model, ", given.sizes(), " in the state dict");
    TORCH_CHECK_VALUE(!dcp::data_of(tensor).is_meta(), name,
                      " is on the meta device, without memory: to_empty() the model first");
    TORCH_CHECK_VALUE(!dcp::data_of(given).is_meta(), name,
                      " has no values in the state dict: it is on the meta device");
    found.items.push_back(i);
  }
  const std::unordered_set<std::string> known(names.begin(), names.end());
  for (const auto& [key, value] : state) {
    if (known.count(key) == 0) found.incompatible.unexpected_keys.push_back(key);
  }
  if (!options.strict) return found;
  const auto& [missing, unexpected] = found.incompatible;
  TORCH_CHECK_VALUE(missing.empty(), "the state dict lacks ", dcp::short_list(missing),
                    dcp::near_names(missing.empty() ? "" : missing[0], state.keys()),
                    " (strict = false leaves it as it is)");
  TORCH_CHECK_VALUE(unexpected.empty(), "the model has no ", dcp::short_list(unexpected),
                    dcp::near_names(unexpected.empty() ? "" : unexpected[0], names),
                    " (strict = false ignores it)");
  return found;
}

/// What a load has filled in place is there already.
bool is_same_memory(const torch::Tensor& a, const torch::Tensor& b) {
  if (is_dtensor(a) != is_dtensor(b) || a.scalar_type() != b.scalar_type()) return false;
  const torch::Tensor x = dcp::data_of(a), y = dcp::data_of(b);
  return x.is_alias_of(y) && x.storage_offset() == y.storage_offset() && x.sizes() == y.sizes() &&
         x.strides() == y.strides();
}

/// Rank 0 says what it has; every rank receives and keeps its part.
IncompatibleKeys receive(const Selection& selection, const StateDict& state,
                         const StateDictOptions& options, const Exchange& exchange) {
  const auto answers = exchange.all([&] {
    if (exchange.rank() != 0) return std::string();
    const Assignments found = check_state(selection, state, options);
    Json items = Json::array();
    for (const size_t i : found.items) {
      items.push_back(
          {i, static_cast<int>(state.at(selection.items[i].name).to_tensor().scalar_type())});
    }
    return Json{items, found.incompatible.missing_keys, found.incompatible.unexpected_keys}.dump();
  });
  const Json answer = Json::parse(answers[0]);
  for (const Json& entry : answer[0]) {
    const auto& item = selection.items.at(entry[0].get<size_t>());
    const torch::Tensor given =
        exchange.rank() == 0 ? state.at(item.name).to_tensor() : torch::Tensor();
    const auto dtype = static_cast<torch::ScalarType>(entry[1].get<int>());
    item.tensor.detach().copy_(dcp::from_rank_0(given, dtype, item.tensor.sizes().vec()));
  }
  return {answer[1].get<std::vector<std::string>>(), answer[2].get<std::vector<std::string>>()};
}

}  // namespace

dcp::StateDict get_model_state_dict(const torch::nn::Module& model,
                                    const StateDictOptions& options) {
  StateDict state;
  for (const auto& item : select(model, options).items) {
    if (!item.optional) state[item.name] = item.tensor.detach();
  }
  return dcp::finished(std::move(state), options);
}

IncompatibleKeys set_model_state_dict(torch::nn::Module& model, const dcp::StateDict& state,
                                      const StateDictOptions& options) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(nullptr, "setting the model's state");
  const Selection selection = select(model, options);
  if (options.broadcast_from_rank0) return receive(selection, state, options, exchange);
  Assignments found;
  exchange.agree([&] { found = check_state(selection, state, options); });
  for (const size_t i : found.items) {
    const auto& item = selection.items[i];
    const torch::Tensor& given = state.at(item.name).to_tensor();
    if (!is_same_memory(given, item.tensor)) item.tensor.detach().copy_(given);
  }
  return found.incompatible;
}

}  // namespace fsdp2
