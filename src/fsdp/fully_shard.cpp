#include "fsdp/touch.h"
#include "fsdp/wrap_plan.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/fully_shard.h>
#include <fsdp2/module_states.h>

#include <cstdlib>

namespace fsdp2 {

using fsdp::Entry;
using fsdp::ModulePtr;
using fsdp::Plan;
using fsdp::State;
using fsdp::Twin;
using fsdp::wrapped_modules;

namespace {

/// One group a mesh, in the order of first use.
std::vector<std::pair<std::shared_ptr<ParamGroup>, std::vector<size_t>>> make_groups(
    const Plan& plan) {
  std::vector<std::pair<std::shared_ptr<ParamGroup>, std::vector<size_t>>> groups;
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const DeviceMesh& mesh = plan.parameters[i].mesh;
    auto found = groups.begin();
    while (found != groups.end() && !(found->first->mesh() == mesh)) ++found;
    if (found == groups.end()) {
      groups.emplace_back(std::make_shared<ParamGroup>(mesh, plan.policy), std::vector<size_t>());
      found = groups.end() - 1;
    }
    found->second.push_back(i);
  }
  return groups;
}

DeviceMesh post_forward_mesh(const Plan& plan, const DeviceMesh& mesh) {
  if (plan.reshard_to == 0 || mesh.size(mesh.ndim() - 1) % plan.reshard_to != 0) return {};
  return neighbours(mesh, plan.reshard_to);
}

void absorb_inner(const Plan& plan, const std::shared_ptr<Schedule>& schedule) {
  for (const State& state : plan.inner) {
    auto inner = state->schedule;
    schedule->absorb(*inner);
    state->root = false;
  }
  for (const State& state : plan.inner) {
    state->schedule = schedule;
    state->apply_reshard_after_forward();
  }
}

}  // namespace

FSDPModule fully_shard(const std::vector<ModulePtr>& modules, const FullyShardOptions& options) {
  Plan plan = fsdp::make_plan(modules, options);
  if (const char* debug = std::getenv("FSDP2_DEBUG"); debug && std::string(debug) == "1") {
    for (const ModulePtr& module : modules) check_module_states(*module, plan.mesh);
  }

  fsdp::register_gathered();
  register_dtensor();
  at::NoGradGuard no_grad;
  for (torch::Tensor& buffer : plan.buffers) {
    if (buffer.device() != plan.mesh.device() && !buffer.is_meta())
      buffer.set_data(buffer.to(plan.mesh.device()));
  }
  rename_inner(plan);
  auto schedule = std::make_shared<Schedule>();
  absorb_inner(plan, schedule);

  std::vector<FSDPModule::Impl::Owned> owned;
  const auto groups = make_groups(plan);
  for (const auto& [group, indexes] : groups) {
    std::vector<fsdp::ParamSpec> specs;
    FSDPModule::Impl::Owned& mine = owned.emplace_back();
    for (size_t i : indexes) {
      specs.push_back(plan.parameters[i].spec);
      mine.names.push_back(plan.parameters[i].spec.name);
    }
    mine.group = group;
    group->adopt(specs);
    group->set_post_forward_mesh(post_forward_mesh(plan, group->mesh()));
    schedule->add(group);
    for (size_t k = 0; k < indexes.size(); ++k) {
      for (const Entry& entry : plan.parameters[indexes[k]].entries)
        *entry.registered = group->params()[k].shard;
    }
    for (const State& state : plan.inner) {
      for (const auto& below : state->groups()) below->ancestors.insert(group.get());
    }
    for (const auto& [sibling, unused] : groups) {
      if (sibling != group) group->ancestors.insert(sibling.get());
    }
  }
  // Tied to a module that was wrapped on its own: one parameter still.
  for (const Entry& entry : plan.shared) {
    const auto* storage = fsdp::gathered_storage(*entry.registered);
    *entry.registered = storage->group()->params()[storage->index()].shard;
  }

  for (const Twin& twin : plan.twins) twin.parent->replace_module(twin.name, twin.module);
  schedule->check_after_backward(fsdp::census(modules, options.ignored_params));

  State first;
  for (size_t i = 0; i < modules.size(); ++i) {
    const ModulePtr& module = modules[i];
    auto state = std::make_shared<FSDPModule::Impl>();
    state->module = module;
    state->name = module->name();
    state->schedule = schedule;
    state->owned = owned;
    for (const auto& planned : plan.parameters) state->parameter_names.push_back(planned.spec.name);
    for (const torch::Tensor& ignored : options.ignored_params)
      state->ignored.emplace_back(ignored.getIntrusivePtr());
    if (modules.size() > 1) state->prefix = std::to_string(i) + ".";
    state->reshard_after_forward = plan.reshard_after_forward;
    state->mp_policy = options.mp_policy;
    state->apply_reshard_after_forward();
    wrapped_modules().add(module, state);
    if (!first) first = state;
  }
  return FSDPModule(first);
}

FSDPModule fully_shard(const ModulePtr& module, const FullyShardOptions& options) {
  return fully_shard(std::vector<ModulePtr>{module}, options);
}

bool is_fsdp(const torch::nn::Module& module) { return wrapped_modules().find(module) != nullptr; }

FSDPModule as_fsdp(const torch::nn::Module& module) {
  State state = wrapped_modules().find(module);
  TORCH_CHECK(state, "as_fsdp: fully_shard was not called on this ", module.name());
  return FSDPModule(state);
}

}  // namespace fsdp2
