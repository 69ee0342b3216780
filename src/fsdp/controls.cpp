// What a user does with a wrapped module besides using it.

#include "fsdp/wrapped_modules.h"

#include <functional>

namespace fsdp2 {

using fsdp::State;
using fsdp::wrapped_modules;

struct UnshardHandle::Impl {
  std::shared_ptr<ParamGroup> group;
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
