#include "fsdp/param_group.h"

#include "comm/exits.h"
#include "fsdp/checks.h"
#include "fsdp/plain_ops.h"
#include "fsdp/schedule.h"

#include <fsdp2/placement.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

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

/// A gradient that cannot be read.
struct StaleGradientStorage final : c10::StorageImpl {
  StaleGradientStorage(const std::string& name, int64_t nbytes, c10::Device device)
      : c10::StorageImpl(use_byte_size_t(), c10::SymInt(nbytes), c10::DataPtr(nullptr, device),
                         c10::GetAllocator(device.type()), /*resizable=*/false) {
    release_data_and_set_meta_custom_data_ptr_error_msg_(
        "this handle of parameter '" + name +
        "' is the module's own tensor, whose gradient went to the shard. An optimizer (or "
        "clipping) "
        "must be given module->parameters() as they are after fully_shard.");
  }
};

torch::Tensor stale_gradient(const ParamLayout& layout, c10::Device device) {
  c10::intrusive_ptr<c10::StorageImpl> storage =
      c10::make_intrusive<StaleGradientStorage>(layout.name, layout.nbytes(), device);
  torch::Tensor gradient = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(c10::computeDispatchKey(layout.dtype, c10::Layout::Strided, device)),
      caffe2::TypeMeta::fromScalarType(layout.dtype));
  gradient.unsafeGetTensorImpl()->set_sizes_contiguous(layout.sizes);
  return gradient;
}

bool is_stale(const torch::Tensor& gradient) {
  return gradient.defined() && gradient.has_storage() &&
         dynamic_cast<StaleGradientStorage*>(gradient.storage().unsafeGetStorageImpl());
}

/// Runs before a gradient is accumulated into a member.
struct ClearStaleGradient final : torch::autograd::FunctionPreHook {
  explicit ClearStaleGradient(WeakTensor member) : member(std::move(member)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (auto impl = member.lock()) {
      const torch::Tensor tensor(std::move(impl));
      if (is_stale(tensor.grad())) tensor.mutable_grad().reset();
    }
    return gradients;
  }
  WeakTensor member;
};

struct ShardWrites final : WriteObserver {
  ShardWrites(std::weak_ptr<ParamGroup> group, size_t index)
      : group(std::move(group)), index(index) {}
  void before_write() override {
    if (auto owner = group.lock()) owner->before_write(index);
  }
  std::weak_ptr<ParamGroup> group;
  size_t index;
};

ParamLayout layout_of(const torch::Tensor& member, const std::string& name,
                      torch::ScalarType dtype) {
  ParamLayout layout;
  layout.name = name;
  layout.sizes = member.sizes().vec();
  layout.strides = member.is_non_overlapping_and_dense()
                       ? member.strides().vec()
                       : at::empty_like(member, at::MemoryFormat::Contiguous).strides().vec();
  layout.dtype = dtype;
  layout.numel = member.numel();
  layout.replicated = member.dim() == 0;
  return layout;
}

Placements placements_of(const ParamLayout& layout, const DeviceMesh& mesh) {
  Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
  if (!layout.replicated) placements.back() = Shard(0);
  return placements;
}

}  // namespace

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

void ParamGroup::adopt(const std::vector<torch::Tensor>& members,
                       const std::vector<std::string>& names) {
  const c10::Device device = mesh_.device();
  std::vector<ParamLayout> layouts;
  for (size_t i = 0; i < members.size(); ++i) {
    const torch::ScalarType own = members[i].scalar_type();
    const bool cast = members[i].is_floating_point();
    layouts.push_back(
        layout_of(members[i], names[i], cast ? mp_policy.param_dtype.value_or(own) : own));
  }
  comm_ = make_copying_comm(mesh_, layouts);
  for (size_t i = 0; i < members.size(); ++i) {
    const torch::Tensor& member = members[i];
    torch::Tensor shard = make_shard(member, layouts[i]);
    auto storage = c10::make_intrusive<GatheredStorage>(shared_from_this(), i, names[i],
                                                        layouts[i].nbytes(), device);
    c10::intrusive_ptr<c10::StorageImpl> base = std::move(storage);
    auto observer = std::make_shared<ShardWrites>(weak_from_this(), i);
    set_write_observer(shard, observer);
    Param param{.layout = layouts[i],
                .shard_dtype = shard.scalar_type(),
                .shard = shard,
                .member = WeakTensor(member.getIntrusivePtr()),
                .storage = WeakStorage(base),
                .observer = std::move(observer)};
    param.reduce_dtype = member.is_floating_point()
                             ? mp_policy.reduce_dtype.value_or(layouts[i].dtype)
                             : layouts[i].dtype;
    param.member_requires_grad = member.requires_grad();
    params_.push_back(std::move(param));
    // The bit, on a storage that can be empty; everything else about the member stays.
    const c10::DispatchKey dense =
        c10::computeDispatchKey(layouts[i].dtype, c10::Layout::Strided, device);
    torch::Tensor hollow = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(base)),
        c10::DispatchKeySet(dense) | c10::DispatchKeySet(kGatheredBit),
        caffe2::TypeMeta::fromScalarType(layouts[i].dtype));
    hollow.unsafeGetTensorImpl()->set_sizes_and_strides(layouts[i].sizes, layouts[i].strides, 0);
    member.set_data(hollow);
    torch::autograd::impl::set_post_acc_grad_hooks(
        member, std::make_unique<GradientReady>(shared_from_this(), i));
    torch::autograd::impl::add_hook(
        member, std::make_unique<ClearStaleGradient>(WeakTensor(member.getIntrusivePtr())));
  }
  name_group();
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
}

torch::Tensor ParamGroup::make_shard(const torch::Tensor& member, const ParamLayout& layout) {
  at::NoGradGuard no_grad;
  torch::Tensor local = member.detach();
  if (!layout.replicated) {
    const int64_t shard_dim = mesh_.ndim() - 1;
    const Chunk chunk =
        chunk_of(local.size(0), mesh_.size(shard_dim), mesh_.get_local_rank(shard_dim));
    local = local.narrow(0, chunk.offset, chunk.length);
  }
  local = local.to(mesh_.device()).clone(at::MemoryFormat::Contiguous);
  torch::Tensor shard = make_dtensor(local, mesh_, placements_of(layout, mesh_), layout.sizes);
  shard.set_requires_grad(member.requires_grad());
  return shard;
}

void ParamGroup::start_gather(const GatherWords& words) {
  std::vector<torch::Tensor> shards;
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& param = params_[i];
    check_member(i);
    const torch::Tensor& local = local_part(param.shard);
    TORCH_CHECK(local.scalar_type() == param.shard_dtype && local.device() == mesh_.device(),
                "parameter '", param.layout.name, "' was sharded as ", param.shard_dtype, " on ",
                mesh_.device(), ", but its shard is now ", local.scalar_type(), " on ",
                local.device(), ": convert or move a module before fully_shard, not after");
    if (!local.is_inference()) param.local_version = local._version();
    shards.push_back(local);
  }
  comm::note_doing(gather_text_);
  gather_ = comm_->start_gather(shards, words);
}

std::vector<GatherWords> ParamGroup::finish_gather() {
  std::unique_ptr<Gather> gather = std::move(gather_);
  std::vector<c10::DataPtr> bytes = gather->finish(gather_text_);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (auto storage = params_[i].storage.lock()) {
      static_cast<GatheredStorage*>(storage.get())->fill(std::move(bytes[i]));
    }
  }
  unsharded_ = true;
  return gather->words();
}

void ParamGroup::reshard() {
  if (pins > 0) return;
  gather_.reset();
  if (!unsharded_) return;
  for (Param& param : params_) {
    if (auto storage = param.storage.lock()) static_cast<GatheredStorage*>(storage.get())->drop();
  }
  unsharded_ = false;
}

bool ParamGroup::trainable() const {
  for (const Param& param : params_) {
    if (param.shard.requires_grad()) return true;
  }
  return false;
}

bool ParamGroup::has_gradients() const {
  for (const Param& param : params_) {
    torch::Tensor member = param.lock_member();
    if (member.defined() && member.grad().defined() && !is_stale(member.grad())) return true;
  }
  return false;
}

void ParamGroup::start_reduce(uint32_t fingerprint) {
  std::map<torch::ScalarType, std::pair<std::vector<size_t>, std::vector<torch::Tensor>>> by_dtype;
  for (size_t i = 0; i < params_.size(); ++i) {
    torch::Tensor member = params_[i].lock_member();
    torch::Tensor gradient;
    if (member.defined() && !is_stale(member.grad())) {
      gradient = member.grad();
      member.mutable_grad().reset();
    }
    torch::Tensor accumulated = std::exchange(params_[i].accumulated, {});
    if (!params_[i].shard.requires_grad()) continue;
    auto& [indexes, gradients] = by_dtype[params_[i].reduce_dtype];
    indexes.push_back(i);
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
    if (accumulated.defined()) {
      PlainOps plain;
      gradient = gradient.defined() ? accumulated.add_(gradient) : accumulated;
    }
    gradients.push_back(gradient.defined() ? gradient.detach() : gradient);
  }
  comm::note_doing(reduce_text_);
  for (auto& [dtype, bucket] : by_dtype) {
    auto& [indexes, gradients] = bucket;
    auto reduce = comm_->start_reduce(indexes, gradients, dtype, fingerprint);
    reduces_.push_back({std::move(indexes), std::move(reduce)});
  }
}

void ParamGroup::finish_reduce() {
  std::vector<PendingReduce> pending = std::move(reduces_);
  reduces_.clear();
  for (PendingReduce& item : pending) {
    Reduce::Result result = item.reduce->finish(reduce_text_);
    TORCH_CHECK(result.agreed,
                "ranks reduced gradients of different parameter groups in one step; "
                "this rank reduced group '",
                name_,
                "'. Every rank must run backward through the "
                "same wrapped modules, in the same order.");
    for (size_t i = 0; i < item.params.size(); ++i) {
      if (result.users[i] == 0) continue;  // unused everywhere: stays undefined everywhere
      add_gradient(params_[item.params[i]], std::move(result.gradients[i]));
    }
  }
}

void ParamGroup::add_gradient(Param& param, torch::Tensor gradient) {
  at::NoGradGuard no_grad;
  {
    PlainOps plain;
    gradient = gradient.to(param.shard_dtype);
  }
  torch::Tensor shard = param.shard;
  torch::Tensor incoming =
      make_dtensor(gradient, mesh_, placements_of(param.layout, mesh_), param.layout.sizes);
  for (const auto& hook : torch::autograd::impl::hooks(shard)) {
    torch::autograd::variable_list passed = (*hook)({incoming});
    if (passed[0].defined()) incoming = passed[0];
  }
  if (shard.grad().defined()) {
    shard.mutable_grad().add_(incoming);
  } else {
    shard.mutable_grad() = std::move(incoming);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(shard)) (*hook)(shard);
}

void ParamGroup::accumulate_gradients() {
  PlainOps plain;
  for (Param& param : params_) {
    const torch::Tensor member = param.lock_member();
    if (!member.defined() || param.reduce_dtype == param.layout.dtype) continue;
    torch::Tensor& gradient = member.mutable_grad();
    if (!gradient.defined() || is_stale(gradient)) continue;
    if (param.accumulated.defined()) {
      param.accumulated.add_(gradient);
    } else {
      param.accumulated = gradient.to(param.reduce_dtype);
    }
    gradient.reset();
  }
}

void ParamGroup::discard_gradients() {
  reduces_.clear();
  for (Param& param : params_) {
    param.accumulated.reset();
    if (torch::Tensor member = param.lock_member(); member.defined()) member.mutable_grad().reset();
  }
}

void ParamGroup::poison_gradients() {
  for (Param& param : params_) {
    torch::Tensor member = param.lock_member();
    if (!member.defined() || !param.shard.requires_grad()) continue;
    if (!param.stale_gradient.defined()) {
      param.stale_gradient = stale_gradient(param.layout, mesh_.device());
    }
    member.mutable_grad() = param.stale_gradient;
  }
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
    if (local.is_inference() || local._version() == params_[i].local_version) continue;
    params_[i].local_version = local._version();
    before_write(i);
  }
}

void ParamGroup::before_write(size_t index) {
  ++generation_;
  if (torch::Tensor member = params_[index].lock_member(); member.defined()) {
    torch::autograd::impl::bump_version(member);
  }
  schedule->shards_changed(*this);
}

}  // namespace fsdp2::fsdp
