#pragma once

// Which modules are wrapped, and what is known of each.

#include "fsdp/param_group.h"
#include "fsdp/schedule.h"

#include <fsdp2/fully_shard.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace fsdp2 {

using fsdp::ParamGroup;
using fsdp::Schedule;

/// What is known of one wrapped module.
struct FSDPModule::Impl {
  /// A group of this module, and its parameters' names as the module sees them.
  struct Owned {
    std::weak_ptr<ParamGroup> group;
    std::vector<std::string> names;
  };
  std::weak_ptr<torch::nn::Module> module;
  std::string name;
  std::shared_ptr<Schedule> schedule;
  std::vector<Owned> owned;  // none if every parameter belongs to wrapped children
  std::vector<std::string> parameter_names;
  std::string prefix;  // of those that this module has, if its group is that of several modules
  bool root = true;
  std::optional<bool> reshard_after_forward;
  std::vector<fsdp::WeakTensor> ignored;
  MixedPrecisionPolicy mp_policy;

  std::vector<std::shared_ptr<ParamGroup>> groups() const {
    std::vector<std::shared_ptr<ParamGroup>> alive;
    for (const Owned& each : owned) {
      if (auto group = each.group.lock()) alive.push_back(std::move(group));
    }
    return alive;
  }
  void apply_reshard_after_forward() const {
    for (const auto& group : groups())
      group->reshard_after_forward = reshard_after_forward.value_or(!root);
  }
  std::shared_ptr<torch::nn::Module> alive() const {
    auto locked = module.lock();
    TORCH_CHECK(locked, "this FSDPModule's module ('", name, "') is gone");
    return locked;
  }
};

namespace fsdp {

using ModulePtr = std::shared_ptr<torch::nn::Module>;
using State = std::shared_ptr<FSDPModule::Impl>;

/// Wrapped modules by address; an entry counts only while its module lives.
class WrappedModules {
 public:
  State find(const torch::nn::Module& module) {
    std::lock_guard lock(mutex_);
    const auto found = states_.find(&module);
    if (found == states_.end() || found->second->module.expired()) return nullptr;
    return found->second;
  }
  void add(const ModulePtr& module, State state) {
    std::lock_guard lock(mutex_);
    std::erase_if(states_, [](const auto& entry) { return entry.second->module.expired(); });
    states_[module.get()] = std::move(state);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, State> states_;
};

WrappedModules& wrapped_modules();

}  // namespace fsdp
}  // namespace fsdp2
