#pragma once

// replicate: data parallelism by replication, for unmodified torch::nn modules, on libtorch's own
// c10d::Reducer. Follows torch.distributed._composable.replicate and DistributedDataParallel
// (pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
//
//   auto replica = fsdp2::replicate(model);
//   torch::optim::AdamW optimizer(model->parameters());
//   loss(model->forward(x)).backward(); optimizer.step();   // as in one process
//
// The module stays as it is and is called as before: every backward() that reaches its parameters
// leaves in their `.grad()` the mean over the ranks, in buckets that are reduced while backward
// runs on. Where nothing is called through a wrapper there is nothing to forget: a forward() of
// the module, or of a part of it, averages too. autograd::grad gives this rank's gradient, and so
// do hooks on parameters.
//
// Backward is collective: every rank must run it, as often as the others, and use at least one
// parameter in it. A rank that fails while others wait makes backward an error on all of them, at
// the latest after the group's timeout; then zero_grad() and go on, or stop.

#include <fsdp2/device_mesh.h>

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp2 {

struct ReplicateOptions {
  /// 1-D. Not given: all ranks of the world (which is initialised from the environment if need be).
  DeviceMesh mesh{};
  /// Size of a bucket in MiB; the first one is at most 1 MiB, so that reducing starts early.
  double bucket_cap_mb = 25;
  /// Gradients share the buckets' memory: one copy less.
  bool gradient_as_bucket_view = false;
  /// Parameters may be without gradient in a backward. One with a gradient on some ranks gets the
  /// mean with zeros from the others; one without on all ranks keeps the gradient it had, undefined
  /// ones included. False: a parameter that has no gradient after a backward is an error, on all
  /// ranks, that names it. Costs nothing: no graph is searched.
  bool find_unused_parameters = false;
  /// Every backward that synchronises gives gradients to the same parameters, each as often, as the
  /// first one on this rank did. Parameters may then be without gradient, those do not hold up the
  /// bucket that they are in, and one may get its gradient in several backwards inside of one
  /// (checkpointing by a custom Function, twice on one parameter), which else is an error. A
  /// backward that deviates is an error, on all ranks; where it deviates it names the parameter.
  bool static_graph = false;
  /// The mesh's rank 0 sends its buffers (running statistics, counters) to the others at the end of
  /// every backward that synchronises, hence before the next forward.
  bool broadcast_buffers = true;
  /// Parameters and buffers of the mesh's rank 0 are sent to the others. False: they must be equal.
  bool init_sync = true;
  /// Names as in named_parameters(); these are neither sent nor averaged.
  std::vector<std::string> ignored_parameters{};
};

class NoSyncGuard;

/// The controls of a replicated module. A value type; replication lasts as long as the module,
/// whether this is kept or not.
class ReplicatedModule {
 public:
  /// False: backward adds up this rank's gradients in `.grad()` without communication. True (at
  /// first): the next backward averages what has been added up. The same on all ranks.
  void set_requires_gradient_sync(bool value);
  bool requires_gradient_sync() const;
  /// set_requires_gradient_sync(false) for a scope.
  [[nodiscard]] NoSyncGuard no_sync();
  /// Sends buffers of the mesh's rank 0 to the others now. Collective.
  void sync_buffers();

  struct Impl;
  explicit ReplicatedModule(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

class NoSyncGuard {
 public:
  explicit NoSyncGuard(ReplicatedModule replica)
      : replica_(std::move(replica)), before_(replica_.requires_gradient_sync()) {
    replica_.set_requires_gradient_sync(false);
  }
  ~NoSyncGuard() { replica_.set_requires_gradient_sync(before_); }
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  ReplicatedModule replica_;
  bool before_;
};

/// Replicates every parameter below `module` over the mesh. Collective. Errors, on all ranks and
/// before anything changes, naming the parameter or option: ranks differ in the names, shapes,
/// dtypes, requires_grad or options; the module is replicated already; a parameter is a DTensor, on
/// another device or makes sparse gradients; none requires grad; the mesh is not 1-D. Call it when
/// the module is on its device and in its dtype: to() afterwards is an error in the next backward.
/// So are parameters that are frozen afterwards, unless find_unused_parameters.
/// backward(create_graph) is an error; autograd::grad with create_graph, then a plain backward, is
/// right. A recomputation in a backward of its own (checkpointing by a custom Function) is right
/// where each parameter gets its gradient in one of them, else an error, unless static_graph.
ReplicatedModule replicate(const std::shared_ptr<torch::nn::Module>& module,
                           const ReplicateOptions& options = {});
template <class Impl>
ReplicatedModule replicate(const torch::nn::ModuleHolder<Impl>& module,
                           const ReplicateOptions& options = {}) {
  return replicate(std::static_pointer_cast<torch::nn::Module>(module.ptr()), options);
}

/// True if replicate was called on this very module.
bool is_replicated(const torch::nn::Module& module);
/// The controls of a replicated module. Error if it is not replicated.
ReplicatedModule as_replicated(const torch::nn::Module& module);

}  // namespace fsdp2
