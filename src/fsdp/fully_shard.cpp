#include "fsdp/module_access.h"
#include "fsdp/param_group.h"
#include "fsdp/schedule.h"
#include "fsdp/touch.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/fully_shard.h>

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace fsdp2 {

using fsdp::ParamGroup;
using fsdp::Schedule;

/// What is known of one wrapped module.
struct FSDPModule::Impl {
  std::weak_ptr<torch::nn::Module> module;
  std::string name;
  std::shared_ptr<Schedule> schedule;
  std::weak_ptr<ParamGroup> group;  // none if every parameter belongs to wrapped children
  std::vector<std::string> parameter_names;
  std::string prefix;  // of those that this module has, if its group is that of several modules
  bool root = true;
  std::optional<bool> reshard_after_forward;

  void apply_reshard_after_forward() const {
    if (auto owned = group.lock())
      owned->reshard_after_forward = reshard_after_forward.value_or(!root);
  }
  std::shared_ptr<torch::nn::Module> alive() const {
    auto locked = module.lock();
    TORCH_CHECK(locked, "this FSDPModule's module ('", name, "') is gone");
    return locked;
  }
};

struct UnshardHandle::Impl {
  std::shared_ptr<ParamGroup> group;
};

namespace {

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

WrappedModules& wrapped_modules() {
  static auto* modules = new WrappedModules;
  return *modules;
}

/// One registry entry: where it is, and under which name a user sees it.
struct Entry {
  torch::Tensor* registered;
  std::string name;
};

/// ParameterList and ParameterDict have no members: forward reads their registry. The module keeps
/// the original, with the whole parameters; a twin that holds the shards takes its place in the
/// registry of the parent.
struct Twin {
  torch::nn::Module* parent;
  std::string name;
  ModulePtr module;
};

/// What one call is going to do, worked out before anything changes.
struct Plan {
  std::vector<torch::Tensor> parameters;  // to shard, each once
  std::vector<std::string> names;
  std::vector<std::vector<Entry>> entries;  // of each
  std::vector<Entry> shared;                // entries that hold a member of another group
  std::vector<torch::Tensor> buffers;
  std::vector<State> inner;  // wrapped modules below
  std::vector<std::string> inner_paths;
  std::vector<Twin> twins;
};

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

/// Errors name a parameter by its path from the outermost wrapped module.
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

size_t count_parameters(const torch::nn::Module& module) {
  size_t count = 0;
  for (const auto& below : module.modules()) {
    count += fsdp::registered_parameters(*below).size();
  }
  return count;
}

/// A parameter that is registered after wrapping would be trained by each rank alone.
std::function<void()> census(const std::vector<ModulePtr>& modules) {
  std::vector<std::pair<std::weak_ptr<torch::nn::Module>, size_t>> counted;
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

}  // namespace

FSDPModule fully_shard(const std::vector<ModulePtr>& modules, const FullyShardOptions& options) {
  const DeviceMesh mesh = options.mesh.defined() ? options.mesh : default_mesh();
  check(modules, mesh);
  Plan plan;
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  for (size_t i = 0; i < modules.size(); ++i) {
    plan_module(modules[i], modules.size() > 1 ? std::to_string(i) : "", plan, seen);
  }
  check_policy(options.mp_policy);
  check_parents(modules, plan);
  check_aliases(plan);

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
  schedule->check_after_backward(census(modules));

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

namespace {

/// `module` if it is wrapped, and with `recurse` every wrapped module below it.
void for_each_wrapped(torch::nn::Module& module, bool recurse,
                      const std::function<void(FSDPModule::Impl&)>& run) {
  for (const auto& below : module.modules()) {
    if (!recurse && below.get() != &module) continue;
    if (State state = wrapped_modules().find(*below)) run(*state);
  }
}

}  // namespace

UnshardHandle FSDPModule::unshard(bool async_op) {
  const auto module = impl_->alive();
  auto group = impl_->group.lock();
  if (group) group->schedule->unshard(*group, async_op);
  auto handle = std::make_shared<UnshardHandle::Impl>();
  handle->group = std::move(group);
  return UnshardHandle(handle);
}

void UnshardHandle::wait() {
  if (!impl_) return;
  if (impl_->group) impl_->group->schedule->unshard(*impl_->group, /*async_op=*/false);
  impl_.reset();
}

void FSDPModule::reshard() {
  const auto module = impl_->alive();
  if (auto group = impl_->group.lock()) group->schedule->reshard(*group);
}

void FSDPModule::set_reshard_after_forward(bool value, bool recurse) {
  for_each_wrapped(*impl_->alive(), recurse, [value](FSDPModule::Impl& state) {
    state.reshard_after_forward = value;
    state.apply_reshard_after_forward();
  });
}

void FSDPModule::set_requires_gradient_sync(bool value, bool recurse) {
  for_each_wrapped(*impl_->alive(), recurse, [value](FSDPModule::Impl& state) {
    if (auto group = state.group.lock()) group->requires_gradient_sync = value;
  });
}

void FSDPModule::set_reshard_after_backward(bool value, bool recurse) {
  for_each_wrapped(*impl_->alive(), recurse, [value](FSDPModule::Impl& state) {
    if (auto group = state.group.lock()) group->reshard_after_backward = value;
  });
}

std::vector<std::string> FSDPModule::parameter_names() const {
  const auto module = impl_->alive();
  return impl_->parameter_names;
}

bool FSDPModule::is_unsharded() const {
  const auto module = impl_->alive();
  const auto group = impl_->group.lock();
  return !group || group->unsharded();
}

}  // namespace fsdp2
