#include "fsdp/param_group.h"

#include "comm/exits.h"
#include "comm/trace_range.h"
#include "dispatch/replace_data.h"
#include "fsdp/checks.h"
#include "fsdp/plain_ops.h"
#include "fsdp/schedule.h"
#include "fsdp/stale_gradient.h"

#include <fsdp2/placement.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp2::fsdp {
namespace {

/// Tells the schedule that a member's whole gradient is there.
struct GradientReady final : torch::autograd::PostAccumulateGradHook {
  GradientReady(std::shared_ptr<ParamGroup> group, size_t index)
      : group(std::move(group)), index(index) {}
  void operator()(const torch::autograd::Variable&) override {
    group->schedule->gradient_ready(*group, index);
  }
  std::shared_ptr<ParamGroup> group;
  size_t index;
};

ParamLayout layout_of(const ParamSpec& spec, torch::ScalarType dtype) {
  const torch::Tensor& member = spec.tensor;
  ParamLayout layout;
  layout.name = spec.name;
  layout.sizes = member.sizes().vec();
  layout.strides = member.is_non_overlapping_and_dense()
                       ? member.strides().vec()
                       : at::empty_like(member, at::MemoryFormat::Contiguous).strides().vec();
  layout.dtype = dtype;
  layout.numel = member.numel();
  layout.shard_dim = spec.shard_dim;
  layout.extension = spec.extension;
  return layout;
}

}  // namespace

void ShardWrites::before_write() {
  if (auto owner = group.lock()) owner->before_write(index);
}

torch::Tensor Param::lock_member() const {
  auto impl = member.lock();
  return impl ? torch::Tensor(std::move(impl)) : torch::Tensor();
}

void Param::align_requires_grad(const torch::Tensor& member_tensor) {
  // Two forwards in threads may get here at once: nothing is written where nothing has changed.
  const bool wanted = member_tensor.requires_grad();
  if (wanted == member_requires_grad && wanted == shard.requires_grad()) return;
  const bool member_changed = wanted != member_requires_grad;
  if (member_changed) shard.set_requires_grad(member_tensor.requires_grad());
  if (member_tensor.requires_grad() != shard.requires_grad()) {
    member_tensor.set_requires_grad(shard.requires_grad());
  }
  member_requires_grad = member_tensor.requires_grad();
}

void ParamGroup::adopt(const std::vector<ParamSpec>& specs) {
  std::vector<ParamLayout> layouts;
  for (const ParamSpec& spec : specs) {
    const torch::ScalarType own = spec.tensor.scalar_type();
    const bool cast = spec.tensor.is_floating_point();
    layouts.push_back(layout_of(spec, cast ? policy.mp.param_dtype.value_or(own) : own));
  }
  comm_ = make_copying_comm(mesh_, layouts);
  for (size_t i = 0; i < specs.size(); ++i) {
    const torch::Tensor& member = specs[i].tensor;
    torch::Tensor shard = make_shard(member, layouts[i]);
    c10::intrusive_ptr<c10::StorageImpl> storage = c10::make_intrusive<GatheredStorage>(
        shared_from_this(), i, specs[i].name, layouts[i].nbytes(), mesh_.device());
    auto observer = std::make_shared<ShardWrites>(weak_from_this(), i);
    set_write_observer(shard, observer);
    Param param{.layout = layouts[i],
                .shard_dtype = shard.scalar_type(),
                .shard = shard,
                .member = WeakTensor(member.getIntrusivePtr()),
                .storage = WeakStorage(storage),
                .observer = std::move(observer)};
    param.reduce_dtype = member.is_floating_point()
                             ? policy.mp.reduce_dtype.value_or(layouts[i].dtype)
                             : layouts[i].dtype;
    param.member_requires_grad = member.requires_grad();
    params_.push_back(std::move(param));
    dispatch::replace_data(member, make_member_data(layouts[i], c10::Storage(std::move(storage))));
    torch::autograd::impl::set_post_acc_grad_hooks(
        member, std::make_unique<GradientReady>(shared_from_this(), i));
    clear_stale_gradient_before_accumulation(member);
  }
  name_group();
}

/// The bit, on a storage that can be empty.
torch::Tensor ParamGroup::make_member_data(const ParamLayout& layout, c10::Storage storage) const {
  const c10::DispatchKey dense =
      c10::computeDispatchKey(layout.dtype, c10::Layout::Strided, mesh_.device());
  torch::Tensor hollow = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(dense) | gathered_keys(mesh_.device()),
      caffe2::TypeMeta::fromScalarType(layout.dtype));
  hollow.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, 0);
  return hollow;
}

void ParamGroup::rename(size_t index, const std::string& name) {
  Param& param = params_[index];
  param.layout.name = name;
  if (index == 0) name_group();
  param.stale_gradient.reset();
  if (auto storage = param.storage.lock())
    static_cast<GatheredStorage*>(storage.get())->rename(name);
}

void ParamGroup::name_group() {
  name_ = params_.front().layout.name + (params_.size() > 1 ? ", ..." : "");
  gather_text_ = "the all-gather of parameter group '" + name_ + "'";
  reduce_text_ = "the reduce-scatter of the gradients of parameter group '" + name_ + "'";
  ranges_ = {"fsdp2::gather " + name_, "fsdp2::wait gather " + name_, "fsdp2::reduce " + name_,
             "fsdp2::wait reduce " + name_};
}

torch::Tensor ParamGroup::make_shard(const torch::Tensor& member, const ParamLayout& layout) {
  at::NoGradGuard no_grad;
  const int64_t shard_dim = mesh_.ndim() - 1;
  torch::Tensor local =
      layout.local_part(member.detach(), mesh_.size(shard_dim), mesh_.get_local_rank(shard_dim));
  if (!local.is_meta()) local = local.to(policy.shard_device);
  local = local.clone(at::MemoryFormat::Contiguous);
  if (policy.pin_memory && local.is_cpu()) local = local.pin_memory();
  torch::Tensor shard = make_dtensor(local, mesh_, layout.placements(mesh_), layout.sizes);
  shard.set_requires_grad(member.requires_grad());
  return shard;
}

void ParamGroup::materialise(size_t index) {
  Param& param = params_[index];
  if (!local_part(param.shard).is_meta() || policy.shard_device.is_meta()) return;
  give_memory(param.shard, at::TensorOptions()
                               .device(policy.shard_device)
                               .pinned_memory(policy.pin_memory && policy.shard_device.is_cpu()));
  param.local_version = local_part(param.shard)._version();
  param.uninitialised = param.layout.numel > 0;
}

void ParamGroup::check_initialised() const {
  std::vector<std::string> on_meta, without_values;
  for (const Param& param : params_) {
    auto& names = local_part(param.shard).is_meta() ? on_meta : without_values;
    const bool written = local_part(param.shard)._version() != param.local_version;
    if (&names == &without_values && (!param.uninitialised || written)) continue;
    names.push_back(param.layout.name);
  }
  TORCH_CHECK(on_meta.empty() || policy.shard_device.is_meta(), "parameters '",
              c10::Join("', '", on_meta), "'",
              " are still on the meta device: call fsdp2::to_empty(module, device), then give them "
              "values (init_weights, reset_parameters or a checkpoint), before using the module");
  TORCH_CHECK(without_values.empty(), "parameters '", c10::Join("', '", without_values), "'",
              " were given memory by to_empty() but no values: initialise them (init_weights, "
              "reset_parameters, torch::nn::init) or load a checkpoint before using the module");
}

void ParamGroup::start_gather(const GatherWords& words) {
  const comm::TraceRange range(ranges_.gather);
  std::vector<torch::Tensor> shards;
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& param = params_[i];
    check_member(i);
    const torch::Tensor& local = local_part(param.shard);
    TORCH_CHECK(local.scalar_type() == param.shard_dtype && local.device() == policy.shard_device,
                "parameter '", param.layout.name, "' was sharded as ", param.shard_dtype, " on ",
                policy.shard_device, ", but its shard is now ", local.scalar_type(), " on ",
                local.device(), ": convert or move a module before fully_shard, not after");
    if (!local.is_inference()) {
      if (local._version() != param.local_version) post_forward_shards_.clear();
      param.local_version = local._version();
    }
    shards.push_back(local);
  }
  comm::note_doing(gather_text_);
  gather_ = post_forward_shards_.empty()
                ? comm_->start_gather(shards, words)
                : post_forward_comm_->start_gather(post_forward_shards_, words);
}

std::vector<GatherWords> ParamGroup::finish_gather() {
  const comm::TraceRange range(ranges_.wait_gather);
  std::unique_ptr<Gather> gather = std::move(gather_);
  std::vector<c10::DataPtr> bytes = gather->finish(gather_text_);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (auto storage = params_[i].storage.lock()) {
      static_cast<GatheredStorage*>(storage.get())->fill(std::move(bytes[i]));
    }
  }
  unsharded_ = true;
  post_forward_shards_.clear();
  return gather->words();
}

void ParamGroup::set_post_forward_mesh(const DeviceMesh& mesh) {
  post_forward_shards_.clear();
  post_forward_mesh_ = mesh;
  post_forward_comm_.reset();
  if (!mesh.defined()) return;
  std::vector<ParamLayout> layouts;
  layouts.reserve(params_.size());
  for (const Param& param : params_) layouts.push_back(param.layout);
  for (ParamLayout& layout : layouts) layout.extension = nullptr;  // it is whole values that travel
  post_forward_comm_ = make_copying_comm(mesh, std::move(layouts), /*reduces=*/false);
}

void ParamGroup::reshard_after_forward_pass() {
  std::vector<torch::Tensor> kept;
  if (post_forward_comm_ && unsharded_ && pins == 0) {
    PlainOps plain;
    for (const Param& param : params_) {
      const torch::Tensor member = param.lock_member();
      torch::Tensor whole = member.defined()
                                ? with_keys(member, without_gathered_keys(member.key_set()))
                                : at::zeros(param.layout.sizes, param.layout.dtype);
      kept.push_back(
          param.layout
              .local_part(whole, post_forward_mesh_.size(), post_forward_mesh_.get_local_rank())
              .clone(at::MemoryFormat::Contiguous));
    }
  }
  reshard();
  post_forward_shards_ = std::move(kept);
}

void ParamGroup::reshard() {
  if (pins > 0) return;
  gather_.reset();
  prefetched_on_request = false;
  post_forward_shards_.clear();
  if (!unsharded_) return;
  for (Param& param : params_) {
    if (auto storage = param.storage.lock()) static_cast<GatheredStorage*>(storage.get())->drop();
  }
  unsharded_ = false;
}

void ParamGroup::check_member(size_t index) const {
  if (!kChecks) return;
  const Param& param = params_[index];
  const torch::Tensor member = param.lock_member();
  TORCH_CHECK(
      !member.defined() ||
          member.storage().unsafeGetStorageImpl() == param.storage._unsafe_get_target(),
      "the data of the gathered parameter '", param.layout.name,
      "' was replaced after fully_shard (set_data on the module's member): write to the entry "
      "of parameters() instead, for example shard.copy_(values)");
}

void ParamGroup::notice_local_writes() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const torch::Tensor& local = local_part(params_[i].shard);
    if (!local.is_inference() && local._version() != params_[i].local_version) before_write(i);
  }
}

void ParamGroup::before_write(size_t index) {
  ++generation_;
  const torch::Tensor& local = local_part(params_[index].shard);
  if (!local.is_inference()) params_[index].local_version = local._version();
  params_[index].uninitialised = false;
  if (torch::Tensor member = params_[index].lock_member(); member.defined()) {
    torch::autograd::impl::bump_version(member);
  }
  schedule->shards_changed(*this);
}

}  // namespace fsdp2::fsdp
