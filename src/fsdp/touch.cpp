// The kernels through which an op touches a gathered parameter.

#include "fsdp/touch.h"

#include "dispatch/backward.h"
#include "dispatch/intercept.h"
#include "dispatch/op_mode.h"
#include "fsdp/boundary.h"
#include "fsdp/gathered_storage.h"
#include "fsdp/member_writes.h"
#include "fsdp/op_traits.h"
#include "fsdp/param_group.h"
#include "fsdp/schedule.h"

#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>

namespace fsdp2::fsdp {
namespace {

/// Groups whose bytes an op reads, kept until it has run.
class Pins {
 public:
  Pins() = default;
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (const auto& group : groups_) group->schedule->unpin(*group);
  }
  void touch(const GatheredStorage& storage) {
    const auto& group = storage.group();
    group->schedule->touch(*group, storage.index());
    groups_.push_back(group);
  }

 private:
  c10::SmallVector<std::shared_ptr<ParamGroup>, 2> groups_;
};

const std::string& name_of(const GatheredStorage& storage) {
  return storage.group()->params()[storage.index()].layout.name;
}

GatheredStorage& storage_of(const c10::OperatorHandle& op, const torch::Tensor& tensor) {
  GatheredStorage* storage = gathered_storage(tensor);
  TORCH_CHECK(storage, op.schema().name(),
              ": a sharded parameter's storage was replaced. Write to the "
              "entries of parameters() instead.");
  return *storage;
}

/// Whether the op writes, knowingly, to a member that can be written to.
bool writes_to_shards(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                      torch::jit::Stack& stack) {
  if (!info.mutates || (info.flags & (kHiddenWrite | kNoWrite | kWritesByData))) return false;
  bool found = false;
  dispatch::map_arguments(
      info, stack, [&](const torch::Tensor& tensor, size_t i) -> std::optional<torch::Tensor> {
        if (info.written[i] && is_gathered(tensor))
          found = found || storage_of(op, tensor).group()->writable();
        return std::nullopt;
      });
  return found && !dispatch::inside_backward();
}

bool writes(const c10::OperatorHandle& op, const dispatch::OpInfo& info, size_t argument) {
  if (info.flags & kHiddenWrite) return true;
  if (info.flags & kWritesRunningStatistics) {
    return op.schema().arguments()[argument].name().starts_with("running_");
  }
  return info.written[argument] && !(info.flags & kNoWrite);
}

void refuse_write(const c10::OperatorHandle& op, const GatheredStorage& storage) {
  TORCH_CHECK(
      false, op.schema().name(), " writes to (or keeps the memory of) the gathered parameter '",
      name_of(storage),
      "', whose value would be lost when it is resharded. Write to the entry of "
      "parameters() or named_parameters() instead: it is a DTensor that holds this rank's "
      "shard; an optimizer must be made from it, after fully_shard. To pass values on, clone() "
      "the parameter.");
}

void below_autograd(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                    c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (writes_to_shards(op, info, *stack)) return write_to_shards(op, info, *stack);
  Pins pins;
  c10::SmallVector<const c10::StorageImpl*, 4> ours;
  dispatch::map_arguments(
      info, *stack, [&](const torch::Tensor& tensor, size_t i) -> std::optional<torch::Tensor> {
        if (!is_gathered(tensor)) return std::nullopt;
        GatheredStorage& storage = storage_of(op, tensor);
        if (writes(op, info, i)) refuse_write(op, storage);
        if (!info.view && !(info.flags & kSizesOnly)) pins.touch(storage);
        torch::Tensor bare = with_keys(tensor, without_gathered_keys(tensor.key_set()));
        if (info.flags & kOpaqueAlias) return bare.clone();
        ours.push_back(&storage);
        return bare;
      });
  op.redispatchBoxed(without_gathered_keys(keys), stack);
  dispatch::map_returns(
      info, *stack, [&](const torch::Tensor& tensor) -> std::optional<torch::Tensor> {
        if (!tensor.has_storage() || is_gathered(tensor)) return std::nullopt;
        const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
        if (std::find(ours.begin(), ours.end(), storage) == ours.end()) return std::nullopt;
        return with_keys(tensor, tensor.key_set() | gathered_keys(tensor.device()));
      });
}

/// Scope of an op that casts for itself.
class OwnCasts {
 public:
  explicit OwnCasts(bool own) { active = active || own; }
  ~OwnCasts() { active = before_; }
  OwnCasts(const OwnCasts&) = delete;
  OwnCasts& operator=(const OwnCasts&) = delete;
  static thread_local bool active;

 private:
  const bool before_ = active;
};
thread_local bool OwnCasts::active = false;

/// Not in the formulas of backward either: they see the dtypes of forward.
bool casts_inputs() {
  return !OwnCasts::active && (at::GradMode::is_enabled() || !dispatch::inside_backward());
}

/// Casts what meets a parameter to the parameter's dtype, under autograd.
void cast_inputs(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                 torch::jit::Stack& stack, const GatheredStorage& parameter) {
  const MixedPrecisionPolicy& policy = parameter.group()->policy.mp;
  const torch::ScalarType target = parameter.group()->params()[parameter.index()].layout.dtype;
  dispatch::map_arguments(
      info, stack, [&](const torch::Tensor& tensor, size_t i) -> std::optional<torch::Tensor> {
        if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == target ||
            tensor.dim() == 0 || is_gathered(tensor) || info.written[i]) {
          return std::nullopt;
        }
        if (op.schema().arguments()[i].name().starts_with("running_")) return std::nullopt;
        TORCH_CHECK(policy.cast_forward_inputs, op.schema().name(), ": a tensor of ",
                    tensor.scalar_type(), " meets the parameter '", name_of(parameter),
                    "', which computes in ", target,
                    ", and its mp_policy has cast_forward_inputs = false: cast the module's input "
                    "with to(), or let the policy do it");
        return tensor.to(target);
      });
}

/// Before autograd looks at a member.
void before_autograd(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                     torch::jit::Stack* stack, Pins& pins) {
  bool written = false;
  const GatheredStorage* caster = nullptr;  // the first parameter that has the others cast
  dispatch::map_arguments(
      info, *stack, [&](const torch::Tensor& tensor, size_t i) -> std::optional<torch::Tensor> {
        const GatheredStorage* storage = gathered_storage(tensor);
        if (!storage) return std::nullopt;
        written = written || info.written[i];
        if (info.flags & kReadsEarly) pins.touch(*storage);
        Param& param = storage->group()->params()[storage->index()];
        if (param.is_member(tensor)) param.align_requires_grad(tensor);
        if (!caster && storage->group()->policy.mp.param_dtype && tensor.is_floating_point() &&
            !inside_boundary(*storage->group())) {
          caster = storage;
        }
        return std::nullopt;
      });
  if (caster && !info.view && !written && casts_inputs()) cast_inputs(op, info, *stack, *caster);
}

void above_autograd(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                    c10::DispatchKeySet keys, torch::jit::Stack* stack,
                    const dispatch::Next& next) {
  Pins pins;
  before_autograd(op, info, stack, pins);
  const OwnCasts inside(info.flags & kComputesWider);
  next.callBoxed(op, keys, stack);
}

/// The same two for meta tensors: see gathered_keys().
void meta_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  below_autograd(op, dispatch::OpInfo(op.schema(), op_traits(op.schema())), keys, stack);
}

void meta_above_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  Pins pins;
  const dispatch::OpInfo info(op.schema(), op_traits(op.schema()));
  before_autograd(op, info, stack, pins);
  const OwnCasts inside(info.flags & kComputesWider);
  op.redispatchBoxed(keys.remove(c10::DispatchKey::DeferredInit), stack);
}

void register_meta() {
  static auto* library = [] {
    dispatch::set_fake_tensor_kernel(&meta_below_autograd);
    auto* made = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit,
                                    __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&meta_above_autograd>());
    return made;
  }();
  (void)library;
}

}  // namespace

void register_gathered() {
  dispatch::Interception interception;
  interception.bit = kGatheredBit;
  interception.below = &below_autograd;
  interception.above = &above_autograd;
  interception.classify = &op_traits;
  interception.above_composites = kReadsEarly | kComputesWider;
  interception.all_layouts = true;
  dispatch::intercept(interception);
  register_meta();
  register_meta_kernels();
}

}  // namespace fsdp2::fsdp
