#pragma once

// fully_shard: per-parameter fully sharded data parallelism for unmodified torch::nn modules.
// Follows torch.distributed.fsdp.fully_shard
// (pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
//
//   for (auto& block : *model->blocks) fsdp2::fully_shard(block);   // one group a block
//   fsdp2::fully_shard(model);                                      // the rest: the root group
//   torch::optim::AdamW optimizer(model->parameters());
//   loss(model->forward(x)).backward(); optimizer.step();           // as in one process
//
// After the call `parameters()` yields DTensors, Shard(0) over the mesh; the module's own members
// (`weight`) stay the whole parameters and gather themselves when an op touches them. Gradients are
// averaged over the mesh and arrive in `.grad()` of `parameters()` when backward returns. Make the
// optimizer after the call.

#include <fsdp2/custom_comm.h>
#include <fsdp2/detail/boundary.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/mixed_precision.h>
#include <fsdp2/placement.h>

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fsdp2 {

/// Where one parameter goes: a Shard of any dimension, or Replicate() to keep it whole on every
/// rank; over a mesh of its own (for experts, say) if one is given, else over that of the call.
struct ShardPlacement {
  ShardPlacement(Placement placement, DeviceMesh mesh = {})  // NOLINT(google-explicit-constructor)
      : placement(std::move(placement)), mesh(std::move(mesh)) {}
  Placement placement;
  DeviceMesh mesh;
};

/// Shards stay on the mesh's device.
struct NoOffload {};
/// Shards, their gradients and hence the optimizer's state live in the host's memory; parameters
/// are copied to the device to be gathered, reduced gradients back. With a CPU mesh that is where
/// they are anyway.
struct CPUOffloadPolicy {
  /// Page-locked host memory: copies overlap with compute. Without effect on a CPU mesh.
  bool pin_memory = true;
};
using OffloadPolicy = std::variant<NoOffload, CPUOffloadPolicy>;

struct FullyShardOptions {
  /// 1-D: shard over it. 2-D, with names: replicate over the first dimension, shard over the second
  /// (HSDP); parameters become {Replicate, Shard(0)}. Not given: all ranks of the world (which is
  /// initialised from the environment if need be).
  DeviceMesh mesh{};
  /// True: free the whole parameters after forward and gather them again in backward: less memory,
  /// one more all-gather. A number k, a factor of the sharding dimension's size: keep 1/k of them
  /// after forward, so that backward gathers among k neighbouring ranks only; 1 means false, with a
  /// warning, the full size true. Not given: true, but false for a root (a module that no wrapped
  /// module contains).
  std::optional<std::variant<bool, int64_t>> reshard_after_forward{};
  /// Overrides Shard(0) for single parameters; returns nothing for those it leaves alone. Negative
  /// dims count from the end. Only dim 0 may be split unevenly. Same answers on all ranks.
  std::function<std::optional<ShardPlacement>(const torch::Tensor& parameter)> shard_placement_fn{};
  MixedPrecisionPolicy mp_policy{};
  OffloadPolicy offload_policy{};
  /// Parameters (the very tensors) that are left alone: neither sharded nor moved nor reduced.
  std::vector<torch::Tensor> ignored_params{};
  /// Parameters with fewer elements than this stay whole on every rank: splitting them costs more
  /// than it saves. Their gradients are averaged all the same.
  int64_t replicate_below = 0;
  /// What is sent in the place of a parameter's shards (a quantised form, say), or null to send the
  /// shards. Called once a parameter; see custom_comm.h and all_gather_formats.h.
  std::function<std::shared_ptr<AllGatherExtension>(const torch::Tensor& parameter)>
      all_gather_extension_fn{};
};

/// What unshard() returns: wait() blocks until the parameters are there. Dropping it without
/// waiting is allowed; the first use then waits.
class UnshardHandle {
 public:
  void wait();

  struct Impl;
  explicit UnshardHandle(std::shared_ptr<Impl> impl = nullptr) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// The controls of a wrapped module. A value type; sharding outlives it, and it may outlive the
/// module (then every call is an error).
class FSDPModule {
 public:
  /// Gathers the parameters of this module's own group (not of wrapped children), and keeps them
  /// until reshard() or the end of the next backward. Collective. With `async_op` the gather is
  /// started only.
  UnshardHandle unshard(bool async_op = false);
  /// Frees the whole parameters of this module's own group; shards stay. No communication.
  void reshard();

  // All of the following: the same on all ranks, outside of forward and backward. With `recurse`
  // also for the wrapped modules below.

  void set_reshard_after_forward(bool value, bool recurse = true);
  template <class T>
    requires(!std::same_as<T, bool>)
  void set_reshard_after_forward(T, bool = true) = delete;  // a number: only at wrapping
  /// True at first. False: backward leaves the parameters whole, until reshard(), for another pass.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// Gradient accumulation without communication. False: backward adds up whole gradients on each
  /// rank, and those of `parameters()` stay as they are. True (at first): backward reduces what
  /// there is. zero_grad() of the optimizer does not reach what has been added up; a backward that
  /// fails drops it. Sets requires_all_reduce too.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// With HSDP. False: backward sums gradients within each copy only and keeps the sums aside;
  /// `grad` of `parameters()` stays as it is. True (at first): backward adds what was kept and sums
  /// over the copies. Without replicas nothing changes.
  void set_requires_all_reduce(bool value, bool recurse = true);
  /// Taken for the sake of code that comes from Python. Gradients are complete when backward
  /// returns, whether it is the last one or not.
  void set_is_last_backward(bool) {}

  /// The groups that are gathered ahead as soon as this module's has been, in forward or in
  /// backward; all of one root. They stay until they are used or the pass ends. An empty list:
  /// none. Without a call: the group that came next last time.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// False: never gather this module's parameters ahead in backward, as it does not need them there
  /// (an embedding). If backward uses one after all, it is gathered.
  void set_unshard_in_backward(bool value);

  /// Divides summed gradients by `factor` instead of the number of ranks (replicas included).
  void set_gradient_divide_factor(double factor);
  /// Runs on this module's reduced gradients, flat, in reduce_dtype, after their division, outside
  /// of autograd; what it writes is what arrives in `grad`. With HSDP it comes after the
  /// all-reduce. An empty function: none.
  void set_all_reduce_hook(std::function<void(const torch::Tensor& gradients)> hook);
  /// How many reductions may be on their way at once (1 at first). More overlap, more memory: each
  /// holds a buffer as large as its group.
  void set_reduce_scatter_max_input_buffers(int64_t count, bool recurse = true);
  /// The user's own communication for this module's group; null: the library's. Error if
  /// shard_placement_fn spread the module over several meshes.
  void set_custom_all_gather(std::shared_ptr<AllGather> comm);
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm);
  /// True: staging buffers come from the process group's own allocator (NCCL's, registered with the
  /// network). Error if its backend has none, or with custom communication.
  void set_allocate_memory_from_process_group_for_comm(bool value);

  /// After an exception that was caught in forward or backward: drops the iteration, gradients that
  /// add up included, on the rank that calls it. Only for a root. (The next forward does the same
  /// by itself after a failed backward.)
  void reset_iter_state();

  /// Names of the parameters in this module's own group, as the wrapped module sees them.
  std::vector<std::string> parameter_names() const;
  bool is_unsharded() const;

  struct Impl;
  explicit FSDPModule(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  void set_prefetch(const std::vector<FSDPModule>& modules, bool backward);

  std::shared_ptr<Impl> impl_;
};

/// The controls of a wrapped module whose class is known, which also call it: `sharded(x)` is
/// `module->forward(x)` with the module's boundary around it, at which the policy's
/// cast_forward_inputs and output_dtype are done as in Python (fsdp2/hooked.h says what is cast).
/// Keeps the module alive.
template <class Module>
class Sharded : public FSDPModule {
 public:
  Sharded(FSDPModule controls, std::shared_ptr<Module> module)
      : FSDPModule(std::move(controls)), module_(std::move(module)) {}

  template <class... A>
  auto operator()(A&&... arguments) const {
    return detail::call_with(*module_, detail::NoHooks(), detail::bind_forward<Module>(*module_),
                             std::forward<A>(arguments)...);
  }
  /// Another method through the same boundary: sharded.call(&Impl::encode, x). Stands for
  /// register_fsdp_forward_method; sharding does not need it, as parameters gather in any method.
  template <class Method, class... A>
  auto call(Method method, A&&... arguments) const {
    return detail::call_with(*module_, detail::NoHooks(), detail::bind_method(*module_, method),
                             std::forward<A>(arguments)...);
  }

 private:
  std::shared_ptr<Module> module_;
};

/// Shards every parameter below `module` that no earlier call has sharded, as one group (one a
/// mesh, if shard_placement_fn names several), and moves parameters and buffers to the mesh's
/// device; those on the meta device stay there, see meta_device.h. Wrap children before parents.
/// Collective. Errors, before anything changes: the module was wrapped already; a parent was
/// wrapped before its child; a parameter is aliased by a tensor outside; the mesh is neither 1-D
/// nor a named 2-D one; a placement does not fit.
///
/// Until the first forward with autograd, an op that writes to a member under no_grad
/// (`torch::nn::init::zeros_(linear->weight)`) writes to the shards. Later that is an error.
FSDPModule fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                       const FullyShardOptions& options = {});
/// Several modules as one group, e.g. the final norm and the output head.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options = {});
template <class Impl>
  requires std::derived_from<Impl, torch::nn::Module> && (!std::same_as<Impl, torch::nn::Module>)
Sharded<Impl> fully_shard(const std::shared_ptr<Impl>& module,
                          const FullyShardOptions& options = {}) {
  return {fully_shard(std::static_pointer_cast<torch::nn::Module>(module), options), module};
}
template <class Impl>
Sharded<Impl> fully_shard(const torch::nn::ModuleHolder<Impl>& module,
                          const FullyShardOptions& options = {}) {
  return {fully_shard(std::static_pointer_cast<torch::nn::Module>(module.ptr()), options),
          module.ptr()};
}

/// True if fully_shard was called on this very module.
bool is_fsdp(const torch::nn::Module& module);
/// The controls of a wrapped module. Error if it is not wrapped.
FSDPModule as_fsdp(const torch::nn::Module& module);

}  // namespace fsdp2
