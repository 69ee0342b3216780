#include "fsdp/wrap_plan.h"

#include "fsdp/module_access.h"

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

void plan_module(const ModulePtr& root, const std::string& prefix, Plan& plan,
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
      const std::string name =
          item.key().empty() ? parameter.key() : item.key() + "." + parameter.key();
      if (fsdp::is_gathered(tensor)) {
        plan.shared.push_back({&tensor, name});
        continue;
      }
      auto [found, fresh] = seen.try_emplace(tensor.unsafeGetTensorImpl(), plan.parameters.size());
      if (fresh) {
        plan.parameters.push_back(tensor);
        plan.names.push_back(name);
        plan.entries.emplace_back();
      }
      plan.entries[found->second].push_back({&tensor, name});
    }
    for (const torch::Tensor& buffer : item.value()->buffers(/*recurse=*/false)) {
      if (buffer.defined()) plan.buffers.push_back(buffer);
    }
  }
}

void check(const std::vector<ModulePtr>& modules, const DeviceMesh& mesh) {
  TORCH_CHECK(!modules.empty(), "fully_shard: no module was given");
  TORCH_CHECK(mesh.ndim() == 1 || mesh.ndim() == 2,
              "fully_shard: the mesh must be 1-D, or 2-D to replicate over its first dimension and "
              "shard over its second, but it is ",
              mesh.to_string(), "; pass one or two of its dimensions, mesh[{\"a\", \"b\"}]");
  TORCH_CHECK(mesh.ndim() == 1 || !mesh.mesh_dim_names().empty(),
              "fully_shard: a 2-D mesh must name its dimensions, so that it is plain which one "
              "replicates and which one shards: init_device_mesh(device, shape, {\"replicate\", "
              "\"shard\"})");
  for (const ModulePtr& module : modules) {
    TORCH_CHECK(module, "fully_shard: a module is null");
    TORCH_CHECK(!wrapped_modules().find(*module), "fully_shard was called on this ", module->name(),
                " before: call it once a module (children first, then their parent)");
    TORCH_CHECK(!dynamic_cast<torch::nn::ModuleListImpl*>(module.get()) &&
                    !dynamic_cast<torch::nn::ModuleDictImpl*>(module.get()),
                "fully_shard: a ", module->name(), " has no forward of its own: wrap its elements");
  }
}

void check_policy(const MixedPrecisionPolicy& policy) {
  for (const auto& dtype : {policy.param_dtype, policy.reduce_dtype}) {
    TORCH_CHECK(!dtype || c10::isFloatingType(*dtype), "fully_shard: mp_policy has ",
                c10::toString(dtype.value_or(torch::kFloat)), "; its dtypes must be floating");
  }
}

void check_parents(const std::vector<ModulePtr>& modules, const Plan& plan) {
  std::unordered_set<c10::TensorImpl*> owned_below;
  for (const State& state : plan.inner) {
    auto group = state->group.lock();
    if (!group) continue;
    for (const auto& param : group->params()) owned_below.insert(param.shard.unsafeGetTensorImpl());
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
  for (const torch::Tensor& parameter : plan.parameters) {
    size_t& count = owners[parameter.storage().unsafeGetStorageImpl()];
    ++count;
    // Made as a view: autograd keeps what it is a view of.
    if (parameter.is_view() && bases.insert(parameter._base().unsafeGetTensorImpl()).second)
      ++count;
  }
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const c10::Storage& storage = plan.parameters[i].storage();
    TORCH_CHECK(
        storage.use_count() <= owners[storage.unsafeGetStorageImpl()], "fully_shard: parameter '",
        plan.names[i],
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

Plan make_plan(const std::vector<ModulePtr>& modules, const DeviceMesh& mesh,
               const MixedPrecisionPolicy& policy) {
  check(modules, mesh);
  check_policy(policy);
  Plan plan;
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  for (size_t i = 0; i < modules.size(); ++i) {
    plan_module(modules[i], modules.size() > 1 ? std::to_string(i) : "", plan, seen);
  }
  check_parents(modules, plan);
  check_aliases(plan);
  return plan;
}

void rename_inner(const Plan& plan) {
  for (size_t i = 0; i < plan.inner.size(); ++i) {
    const FSDPModule::Impl& state = *plan.inner[i];
    const auto group = state.group.lock();
    if (!group) continue;
    for (size_t p = 0; p < state.parameter_names.size(); ++p) {
      const std::string& name = state.parameter_names[p];
      if (!name.starts_with(state.prefix)) continue;
      group->rename(p, plan.inner_paths[i] + "." + name.substr(state.prefix.size()));
    }
  }
}

std::function<void()> census(const std::vector<ModulePtr>& modules) {
  std::vector<std::pair<std::weak_ptr<torch::nn::Module>, size_t>> counted;
  counted.reserve(modules.size());
  for (const ModulePtr& module : modules) counted.emplace_back(module, count_parameters(*module));
  return [counted] {
    for (const auto& [weak, count] : counted) {
      const ModulePtr module = weak.lock();
      if (!module || count_parameters(*module) == count) continue;
      for (const auto& item : module->named_parameters()) {
        TORCH_CHECK(is_dtensor(item.value()), "parameter '", item.key(), "' of ", module->name(),
                    " was registered after fully_shard: each rank would train it alone. Register "
                    "it before wrapping.");
      }
    }
  };
}

}  // namespace fsdp2::fsdp
