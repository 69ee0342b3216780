#include "ddp/plan.h"
#include "ddp/replica.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/replicate.h>

#include <mutex>
#include <unordered_map>

namespace fsdp2 {

struct ReplicatedModule::Impl {
  std::shared_ptr<ddp::Replica> replica;
  ddp::Replica& alive() const {
    TORCH_CHECK(replica->module_is_alive(), "this ReplicatedModule's module is gone");
    return *replica;
  }
};

namespace {

using ReplicaPtr = std::shared_ptr<ddp::Replica>;

/// Replicated modules by address; an entry counts only while its module lives.
class ReplicatedModules {
 public:
  ReplicaPtr find(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    drop_dead();
    const auto found = replicas_.find(&module);
    return found == replicas_.end() ? nullptr : found->second;
  }
  void add(const torch::nn::Module& module, ReplicaPtr replica) {
    const std::lock_guard lock(mutex_);
    replicas_[&module] = std::move(replica);
  }

 private:
  void drop_dead() {
    std::erase_if(replicas_, [](const auto& entry) { return !entry.second->module_is_alive(); });
  }
  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, ReplicaPtr> replicas_;
};

ReplicatedModules& replicated_modules() {
  static auto* modules = new ReplicatedModules;
  return *modules;
}

ReplicatedModule handle_of(ReplicaPtr replica) {
  auto impl = std::make_shared<ReplicatedModule::Impl>();
  impl->replica = std::move(replica);
  return ReplicatedModule(std::move(impl));
}

}  // namespace

void ReplicatedModule::set_requires_gradient_sync(bool value) {
  impl_->replica->requires_gradient_sync = value;
}

bool ReplicatedModule::requires_gradient_sync() const {
  return impl_->replica->requires_gradient_sync;
}

NoSyncGuard ReplicatedModule::no_sync() { return NoSyncGuard(*this); }

void ReplicatedModule::sync_buffers() { impl_->alive().sync_buffers(); }

ReplicatedModule replicate(const std::shared_ptr<torch::nn::Module>& module,
                           const ReplicateOptions& options) {
  const DeviceMesh mesh = options.mesh.defined() ? options.mesh : default_mesh();
  TORCH_CHECK(mesh.ndim() == 1, "replicate: the mesh must be 1-D, but it is ", mesh.to_string(),
              ": slice it by a name, or flatten() it");
  const ddp::Plan plan = ddp::make_plan(module, mesh, options);
  const ProcessGroup group = reduce_group_of(mesh, int64_t{0});
  if (options.init_sync) ddp::broadcast_values(plan.values, group);
  auto replica = std::make_shared<ddp::Replica>(plan, group, options);
  replica->watch_parameters();
  replicated_modules().add(*module, replica);
  return handle_of(std::move(replica));
}

bool is_replicated(const torch::nn::Module& module) {
  return replicated_modules().find(module) != nullptr;
}

ReplicatedModule as_replicated(const torch::nn::Module& module) {
  ReplicaPtr replica = replicated_modules().find(module);
  TORCH_CHECK(replica, "as_replicated: replicate was not called on this ", module.name());
  return handle_of(std::move(replica));
}

}  // namespace fsdp2
