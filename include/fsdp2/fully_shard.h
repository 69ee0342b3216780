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

#include <fsdp2/device_mesh.h>
#include <fsdp2/mixed_precision.h>

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2 {

struct FullyShardOptions {
  /// 1-D: shard over it. 2-D, with names: replicate over the first dimension, shard over the second
  /// (HSDP); parameters become {Replicate, Shard(0)}. Not given: all ranks of the world (which is
  /// initialised from the environment if need be).
  DeviceMesh mesh;
  /// Free the whole parameters after forward and gather them again in backward: less memory, one
  /// more all-gather. Not given: true, but false for a root (a module that no wrapped module
  /// contains).
  std::optional<bool> reshard_after_forward;
  MixedPrecisionPolicy mp_policy;
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
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// True at first. False: backward leaves the parameters whole, until reshard(), for another pass.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// Gradient accumulation without communication. False: backward adds up whole gradients on each
  /// rank, and those of `parameters()` stay as they are. True (at first): backward reduces what
  /// there is. The same on all ranks. zero_grad() of the optimizer does not reach what has been
  /// added up; a backward that fails drops it.
  void set_requires_gradient_sync(bool value, bool recurse = true);

  /// Names of the parameters in this module's own group, as the wrapped module sees them.
  std::vector<std::string> parameter_names() const;
  bool is_unsharded() const;

  struct Impl;
  explicit FSDPModule(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Shards every parameter below `module` that no earlier call has sharded, as one group, and moves
/// parameters and buffers to the mesh's device. Wrap children before parents. Collective. Errors,
/// before anything changes: the module was wrapped already; a parent was wrapped before its child;
/// a parameter is aliased by a tensor outside; the mesh is neither 1-D nor a named 2-D one.
FSDPModule fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                       const FullyShardOptions& options = {});
/// Several modules as one group, e.g. the final norm and the output head.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options = {});
template <class Impl>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Impl>& module,
                       const FullyShardOptions& options = {}) {
  return fully_shard(std::static_pointer_cast<torch::nn::Module>(module.ptr()), options);
}

/// True if fully_shard was called on this very module.
bool is_fsdp(const torch::nn::Module& module);
/// The controls of a wrapped module. Error if it is not wrapped.
FSDPModule as_fsdp(const torch::nn::Module& module);

}  // namespace fsdp2
