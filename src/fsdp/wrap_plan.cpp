#include "fsdp/wrap_plan.h"

#include "fsdp/module_access.h"
#include "fsdp/wrap_options.h"
#include "mesh/mesh_impl.h"

#include <chrono>
#include <thread>
#include <unordered_set>

namespace fsdp2::fsdp {
namespace {

bool is_parameter_container(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ParameterListImpl*>(&module) ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module);
}

ModulePtr make_twin(torch::nn::Module& original) {
  ModulePtr twin;
  if (dynamic_cast<torch::nn::ParameterListImpl*>(&original)) {
    twin = std::make_shared<torch::nn::ParameterListImpl>();
  } else {
    twin = std::make_shared<torch::nn::ParameterDictImpl>();
  }
  fsdp::registered_parameters(*twin) = fsdp::registered_parameters(original);
  twin->train(original.is_training());
  return twin;
}

/// The twins that the containers below `module` need, by original.
std::unordered_map<torch::nn::Module*, ModulePtr> plan_twins(torch::nn::Module& module,
                                                             Plan& plan) {
  std::unordered_map<torch::nn::Module*, ModulePtr> twins;
  for (const ModulePtr& parent : module.modules()) {
    for (const auto& child : parent->named_children()) {
      if (!is_parameter_container(*child.value())) continue;
      bool whole = false;
      for (const auto& item : fsdp::registered_parameters(*child.value())) {
        whole = whole || (item.value().defined() && !is_dtensor(item.value()));
      }
      if (!whole) continue;
      ModulePtr& twin = twins[child.value().get()];
      if (!twin) twin = make_twin(*child.value());
      plan.twins.push_back({parent.get(), child.key(), twin});
    }
  }
  return twins;
}

/// Parameters that are left alone, here and below.
std::unordered_set<c10::TensorImpl*> ignored_below(const std::vector<ModulePtr>& modules,
                                                   const std::vector<torch::Tensor>& ignored) {
  std::unordered_set<c10::TensorImpl*> out;
  for (const torch::Tensor& tensor : ignored) out.insert(tensor.unsafeGetTensorImpl());
  for (const ModulePtr& module : modules) {
    for (const auto& below : module->modules()) {
      const State state = wrapped_modules().find(*below);
      if (!state) continue;
      for (const WeakTensor& weak : state->ignored) out.insert(weak._unsafe_get_target());
    }
  }
  return out;
}

void plan_module(const ModulePtr& root, const std::string& prefix,
                 const std::unordered_set<c10::TensorImpl*>& ignored, Plan& plan,
                 std::unordered_map<c10::TensorImpl*, size_t>& seen) {
  const auto twins = plan_twins(*root, plan);
  for (const auto& item : root->named_modules(prefix)) {
    if (State state = wrapped_modules().find(*item.value())) {
      plan.inner.push_back(state);
      plan.inner_paths.push_back(item.key());
    }
    const auto twin = twins.find(item.value().get());
    torch::nn::Module& registry = twin == twins.end() ? *item.value() : *twin->second;
    for (auto& parameter : fsdp::registered_parameters(registry)) {
      torch::Tensor& tensor = parameter.value();
      if (!tensor.defined() || is_dtensor(tensor)) continue;
      if (ignored.contains(tensor.unsafeGetTensorImpl())) continue;
      const std::string name =
          item.key().empty() ? parameter.key() : item.key() + "." + parameter.key();
      if (fsdp::is_gathered(tensor)) {
        plan.shared.push_back({&tensor, name});
        continue;
      }
      auto [found, fresh] = seen.try_emplace(tensor.unsafeGetTensorImpl(), plan.parameters.size());
      if (fresh) plan.parameters.push_back({.spec = {.tensor = tensor, .name = name}});
      plan.parameters[found->second].entries.push_back({&tensor, name});
    }
    for (const torch::Tensor& buffer : item.value()->buffers(/*recurse=*/false)) {
      if (buffer.defined()) plan.buffers.push_back(buffer);
    }
  }
}

void check(const std::vector<ModulePtr>& modules) {
  TORCH_CHECK(!modules.empty(), "fully_shard: no module was given");
  for (const ModulePtr& module : modules) {
    TORCH_CHECK(module, "fully_shard: a module is null");
    TORCH_CHECK(!wrapped_modules().find(*module), "fully_shard was called on this ", module->name(),
                " before: call it once a module (children first, then their parent)");
    TORCH_CHECK(!dynamic_cast<torch::nn::ModuleListImpl*>(module.get()) &&
                    !dynamic_cast<torch::nn::ModuleDictImpl*>(module.get()),
                "fully_shard: a ", module->name(), " has no forward of its own: wrap its elements");
  }
}

void check_parents(const std::vector<ModulePtr>& modules, const Plan& plan) {
  std::unordered_set<c10::TensorImpl*> owned_below;
  for (const State& state : plan.inner) {
    for (const auto& group : state->groups()) {
      for (const auto& param : group->params())
        owned_below.insert(param.shard.unsafeGetTensorImpl());
    }
  }
  for (const ModulePtr& module : modules) {
    for (const auto& item : module->named_parameters()) {
      const torch::Tensor& tensor = item.value();
      TORCH_CHECK(
          !is_dtensor(tensor) || owned_below.count(tensor.unsafeGetTensorImpl()),
          "fully_shard: parameter '", item.key(), "' of this ", module->name(),
          " is sharded already, by a call on a module that contains it: wrap children before "
          "their parents");
    }
  }
}

/// A tensor outside that shares a parameter's memory would keep the values of today, and the
/// memory.
void check_aliases(const Plan& plan) {
  std::unordered_map<c10::StorageImpl*, size_t> owners;
  std::unordered_set<c10::TensorImpl*> bases;
  for (const PlannedParam& planned : plan.parameters) {
    const torch::Tensor& parameter = planned.spec.tensor;
    size_t& count = owners[parameter.storage().unsafeGetStorageImpl()];
    ++count;
    // Made as a view: autograd keeps what it is a view of.
    if (parameter.is_view() && bases.insert(parameter._base().unsafeGetTensorImpl()).second)
      ++count;
  }
  for (const PlannedParam& planned : plan.parameters) {
    const c10::Storage& storage = planned.spec.tensor.storage();
    const size_t known = owners[storage.unsafeGetStorageImpl()];
    // A collective that has just ended lets go of its tensors in a thread of its own.
    for (int tries = 0; storage.use_count() > known && tries < 100; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    TORCH_CHECK(
        storage.use_count() <= known, "fully_shard: parameter '", planned.spec.name,
        "' shares its memory with a tensor that is not among the parameters being "
        "sharded (a cached view, a tensor it was set from, a graph that is still alive): that "
        "tensor would keep the old values. Drop or clone() it before fully_shard.");
  }
}

size_t count_parameters(const torch::nn::Module& module) {
  size_t count = 0;
  for (const auto& below : module.modules()) {
    count += fsdp::registered_parameters(*below).size();
  }
  return count;
}

}  // namespace

Plan make_plan(const std::vector<ModulePtr>& modules, const FullyShardOptions& options) {
  check(modules);
  Plan plan;
  plan.mesh = options.mesh.defined() ? options.mesh : default_mesh();
  check_mesh(plan.mesh);
  plan.policy = group_policy(options, plan.mesh);
  plan_reshard_after_forward(options, plan);
  const auto ignored = ignored_below(modules, options.ignored_params);
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  for (size_t i = 0; i < modules.size(); ++i) {
    plan_module(modules[i], modules.size() > 1 ? std::to_string(i) : "", ignored, plan, seen);
  }
  check_parents(modules, plan);
  check_aliases(plan);
  for (PlannedParam& planned : plan.parameters) place(options, plan.mesh, planned);
  return plan;
}

void rename_inner(const Plan& plan) {
  for (size_t i = 0; i < plan.inner.size(); ++i) {
    const FSDPModule::Impl& state = *plan.inner[i];
    for (const FSDPModule::Impl::Owned& owned : state.owned) {
      const auto group = owned.group.lock();
      for (size_t p = 0; group && p < owned.names.size(); ++p) {
        const std::string& name = owned.names[p];
        if (!name.starts_with(state.prefix)) continue;
        group->rename(p, plan.inner_paths[i] + "." + name.substr(state.prefix.size()));
      }
    }
  }
}

std::function<void()> census(const std::vector<ModulePtr>& modules,
                             const std::vector<torch::Tensor>& ignored) {
  std::vector<std::pair<std::weak_ptr<torch::nn::Module>, size_t>> counted;
  counted.reserve(modules.size());
  for (const ModulePtr& module : modules) counted.emplace_back(module, count_parameters(*module));
  return [counted, left_alone = ignored_below(modules, ignored)] {
    for (const auto& [weak, count] : counted) {
      const ModulePtr module = weak.lock();
      if (!module || count_parameters(*module) == count) continue;
      for (const auto& item : module->named_parameters()) {
        TORCH_CHECK(
            is_dtensor(item.value()) || left_alone.contains(item.value().unsafeGetTensorImpl()),
            "parameter '", item.key(), "' of ", module->name(),
            " was registered after fully_shard: each rank would train it alone. Register "
            "it before wrapping.");
      }
    }
  };
}

}  // namespace fsdp2::fsdp
