#include "fsdp/touch.h"
#include "fsdp/wrap_plan.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/fully_shard.h>

namespace fsdp2 {

using fsdp::Entry;
using fsdp::ModulePtr;
using fsdp::Plan;
using fsdp::State;
using fsdp::Twin;
using fsdp::wrapped_modules;

FSDPModule fully_shard(const std::vector<ModulePtr>& modules, const FullyShardOptions& options) {
  const DeviceMesh mesh = options.mesh.defined() ? options.mesh : default_mesh();
  Plan plan = fsdp::make_plan(modules, mesh, options.mp_policy);

  fsdp::register_gathered();
  register_dtensor();
  at::NoGradGuard no_grad;
  for (torch::Tensor& buffer : plan.buffers) {
    if (buffer.device() != mesh.device()) buffer.set_data(buffer.to(mesh.device()));
  }
  rename_inner(plan);
  auto schedule = std::make_shared<Schedule>();
  for (const State& state : plan.inner) {
    auto inner = state->schedule;
    schedule->absorb(*inner);
    state->root = false;
  }
  for (const State& state : plan.inner) {
    state->schedule = schedule;
    state->apply_reshard_after_forward();
  }
  std::shared_ptr<ParamGroup> group;
  if (!plan.parameters.empty()) {
    group = std::make_shared<ParamGroup>(mesh, options.mp_policy);
    group->adopt(plan.parameters, plan.names);
    schedule->add(group);
    for (size_t i = 0; i < plan.parameters.size(); ++i) {
      for (const Entry& entry : plan.entries[i]) *entry.registered = group->params()[i].shard;
    }
    for (const State& state : plan.inner) {
      if (auto below = state->group.lock()) below->ancestors.insert(group.get());
    }
  }
  // Tied to a module that was wrapped on its own: one parameter still.
  for (const Entry& entry : plan.shared) {
    const auto* storage = fsdp::gathered_storage(*entry.registered);
    *entry.registered = storage->group()->params()[storage->index()].shard;
  }

  for (const Twin& twin : plan.twins) twin.parent->replace_module(twin.name, twin.module);
  schedule->check_after_backward(fsdp::census(modules));

  State first;
  for (size_t i = 0; i < modules.size(); ++i) {
    const ModulePtr& module = modules[i];
    auto state = std::make_shared<FSDPModule::Impl>();
    state->module = module;
    state->name = module->name();
    state->schedule = schedule;
    state->group = group;
    state->parameter_names = plan.names;
    if (modules.size() > 1) state->prefix = std::to_string(i) + ".";
    state->reshard_after_forward = options.reshard_after_forward;
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
