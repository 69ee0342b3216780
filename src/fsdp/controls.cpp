// What a user does with a wrapped module besides using it.

#include "fsdp/wrapped_modules.h"

#include <fsdp2/collectives.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <functional>

namespace fsdp2 {

using fsdp::State;
using fsdp::wrapped_modules;

struct UnshardHandle::Impl {
  std::vector<std::shared_ptr<ParamGroup>> groups;
};

namespace {

/// `module` if it is wrapped, and with `recurse` every wrapped module below it.
void for_each_wrapped(torch::nn::Module& module, bool recurse,
                      const std::function<void(FSDPModule::Impl&)>& run) {
  for (const auto& below : module.modules()) {
    if (!recurse && below.get() != &module) continue;
    if (State state = wrapped_modules().find(*below)) run(*state);
  }
}

void for_each_group(torch::nn::Module& module, bool recurse,
                    const std::function<void(ParamGroup&)>& run) {
  for_each_wrapped(module, recurse, [&run](FSDPModule::Impl& state) {
    for (const auto& group : state.groups()) run(*group);
  });
}

/// The one group of a module, or null. Error if there are several.
std::shared_ptr<ParamGroup> only_group(const FSDPModule::Impl& state, const char* what) {
  const auto groups = state.groups();
  TORCH_CHECK(groups.size() <= 1, what, ": the parameters of ", state.name,
              " lie on several meshes (shard_placement_fn), so it is not clear whose "
              "communication is meant");
  return groups.empty() ? nullptr : groups.front();
}

/// Staging buffers from the process group's own allocator.
template <class Comm>
struct GroupAllocated : Comm {
  explicit GroupAllocated(ProcessGroup group) : group(std::move(group)) {}
  torch::Tensor allocate(c10::IntArrayRef sizes, const torch::TensorOptions& options) override {
    torch::Tensor tensor = group->getBackend(options.device().type())
                               ->allocateTensor(c10::multiply_integers(sizes), options);
    return tensor.view(sizes);
  }
  Work operator()(const torch::Tensor& output, const torch::Tensor& input,
                  const ProcessGroup& over) override {
    if constexpr (std::is_same_v<Comm, AllGather>) {
      return all_gather_single(output, input, over);
    } else {
      return reduce_scatter_single(output, input, ReduceOp::kSum, over);
    }
  }
  ProcessGroup group;
};

}  // namespace

UnshardHandle FSDPModule::unshard(bool async_op) {
  const auto module = impl_->alive();
  auto handle = std::make_shared<UnshardHandle::Impl>();
  handle->groups = impl_->groups();
  for (const auto& group : handle->groups) group->schedule->unshard(*group, async_op);
  return UnshardHandle(handle);
}

void UnshardHandle::wait() {
  if (!impl_) return;
  for (const auto& group : impl_->groups) group->schedule->unshard(*group, /*async_op=*/false);
  impl_.reset();
}

void FSDPModule::reshard() {
  const auto module = impl_->alive();
  for (const auto& group : impl_->groups()) group->schedule->reshard(*group);
}

void FSDPModule::set_reshard_after_forward(bool value, bool recurse) {
  for_each_wrapped(*impl_->alive(), recurse, [value](FSDPModule::Impl& state) {
    state.reshard_after_forward = value;
    state.apply_reshard_after_forward();
    for (const auto& group : state.groups()) group->set_post_forward_mesh({});
  });
}

void FSDPModule::set_requires_gradient_sync(bool value, bool recurse) {
  for_each_group(*impl_->alive(), recurse, [value](ParamGroup& group) {
    group.requires_gradient_sync = value;
    group.requires_all_reduce = value;
  });
}

void FSDPModule::set_requires_all_reduce(bool value, bool recurse) {
  for_each_group(*impl_->alive(), recurse,
                 [value](ParamGroup& group) { group.requires_all_reduce = value; });
}

void FSDPModule::set_reshard_after_backward(bool value, bool recurse) {
  for_each_group(*impl_->alive(), recurse,
                 [value](ParamGroup& group) { group.reshard_after_backward = value; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  set_prefetch(modules, /*backward=*/false);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  set_prefetch(modules, /*backward=*/true);
}

void FSDPModule::set_prefetch(const std::vector<FSDPModule>& modules, bool backward) {
  std::vector<std::weak_ptr<ParamGroup>> wanted;
  for (const FSDPModule& module : modules) {
    for (const auto& group : module.impl_->groups()) wanted.push_back(group);
  }
  for_each_group(*impl_->alive(), /*recurse=*/false, [&](ParamGroup& group) {
    (backward ? group.backward_prefetch : group.forward_prefetch) = wanted;
  });
}

void FSDPModule::set_unshard_in_backward(bool value) {
  for_each_group(*impl_->alive(), /*recurse=*/false,
                 [value](ParamGroup& group) { group.unshard_in_backward = value; });
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor != 0,
                    "set_gradient_divide_factor: gradients cannot be divided by ", factor);
  for_each_group(*impl_->alive(), /*recurse=*/false,
                 [factor](ParamGroup& group) { group.gradient_divide_factor = factor; });
}

void FSDPModule::set_all_reduce_hook(std::function<void(const torch::Tensor&)> hook) {
  const auto module = impl_->alive();
  if (const auto group = only_group(*impl_, "set_all_reduce_hook"))
    group->all_reduce_hook = std::move(hook);
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t count, bool recurse) {
  TORCH_CHECK_VALUE(count >= 1, "set_reduce_scatter_max_input_buffers: at least 1, not ", count);
  for_each_group(*impl_->alive(), recurse, [count](ParamGroup& group) {
    group.reduces_in_flight = static_cast<size_t>(count);
  });
}

void FSDPModule::set_custom_all_gather(std::shared_ptr<AllGather> comm) {
  const auto module = impl_->alive();
  if (const auto group = only_group(*impl_, "set_custom_all_gather"))
    group->comm().custom_all_gather = std::move(comm);
}

void FSDPModule::set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm) {
  const auto module = impl_->alive();
  if (const auto group = only_group(*impl_, "set_custom_reduce_scatter"))
    group->comm().custom_reduce_scatter = std::move(comm);
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool value) {
  for_each_group(*impl_->alive(), /*recurse=*/false, [value](ParamGroup& group) {
    fsdp::GroupComm& comm = group.comm();
    const bool ours =
        std::dynamic_pointer_cast<GroupAllocated<AllGather>>(comm.custom_all_gather) != nullptr;
    TORCH_CHECK(ours || (!comm.custom_all_gather && !comm.custom_reduce_scatter),
                "set_allocate_memory_from_process_group_for_comm: group '", group.name(),
                "' has custom communication, which allocates its buffers itself");
    if (!value) {
      comm.custom_all_gather = nullptr;
      comm.custom_reduce_scatter = nullptr;
      return;
    }
    const ProcessGroup over = group.mesh().get_group(group.mesh().ndim() - 1);
    const c10::Device device = group.mesh().device();
    const auto backend = over->getBackend(device.type());
    TORCH_CHECK(backend->supportsTensorAlloc(device.has_index() ? device.index() : 0),
                "set_allocate_memory_from_process_group_for_comm: the backend ",
                backend->getBackendName(), " has no allocator of its own");
    comm.custom_all_gather = std::make_shared<GroupAllocated<AllGather>>(over);
    comm.custom_reduce_scatter = std::make_shared<GroupAllocated<ReduceScatter>>(over);
  });
}

void FSDPModule::reset_iter_state() {
  const auto module = impl_->alive();
  TORCH_CHECK(impl_->root, "reset_iter_state: ", impl_->name,
              " is not a root: call it on the outermost wrapped module");
  impl_->schedule->reset();
}

std::vector<std::string> FSDPModule::parameter_names() const {
  const auto module = impl_->alive();
  return impl_->parameter_names;
}

bool FSDPModule::is_unsharded() const {
  const auto module = impl_->alive();
  for (const auto& group : impl_->groups()) {
    if (!group->unsharded()) return false;
  }
  return true;
}

}  // namespace fsdp2
