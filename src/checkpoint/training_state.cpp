#include "checkpoint/flatten.h"
#include "checkpoint/optimizer_fields.h"
#include "checkpoint/optimizer_names.h"

#include <fsdp2/state_dict.h>

#include <algorithm>
#include <set>

namespace fsdp2 {
namespace {

using dcp::StateDict;

class TrainingState : public dcp::Stateful {
 public:
  TrainingState(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer,
                StateDictOptions options)
      : model_(std::move(model)), optimizer_(optimizer), options_(std::move(options)) {}

  StateDict state_dict() override {
    auto [model, optimizer] = get_state_dict(*model_, optimizer_, options_);
    return {{"model", std::move(model)}, {"optim", std::move(optimizer)}};
  }

  StateDict state_dict_to_load(const std::vector<std::string>& saved_keys) override {
    StateDict state = state_dict();
    if (!options_.flatten_optimizer_state_dict) add_frozen(state["optim"], saved_keys);
    return state;
  }

  void load_state_dict(const StateDict& state) override {
    set_state_dict(*model_, optimizer_, state.at("model").dict(), state.at("optim").dict(),
                   options_);
  }

 private:
  /// Parameters that were trained once and are frozen now have state in the checkpoint only.
  void add_frozen(dcp::Value& optim, const std::vector<std::string>& saved_keys) {
    const std::set<std::string> saved(saved_keys.begin(), saved_keys.end());
    const dcp::OptimizerFields& fields = dcp::OptimizerFields::of(optimizer_);
    for (const dcp::NamedGroup& group : dcp::named_groups(*model_, optimizer_)) {
      for (size_t i = 0; i < group.names.size(); ++i) {
        const std::string& name = group.names[i];
        if (optim[dcp::kState].dict().contains(name)) continue;
        const std::string prefix = "optim.state." + name + ".";
        const auto first = saved.lower_bound(prefix);
        if (first == saved.end() || !first->starts_with(prefix)) continue;
        optim[dcp::kState][name] =
            fields.fresh_state(group.group->params()[i], group.group->options());
      }
    }
  }

  const std::shared_ptr<torch::nn::Module> model_;
  torch::optim::Optimizer& optimizer_;
  const StateDictOptions options_;
};

}  // namespace

std::shared_ptr<dcp::Stateful> training_state(std::shared_ptr<torch::nn::Module> model,
                                              torch::optim::Optimizer& optimizer,
                                              const StateDictOptions& options) {
  return std::make_shared<TrainingState>(std::move(model), optimizer, options);
}

}  // namespace fsdp2
