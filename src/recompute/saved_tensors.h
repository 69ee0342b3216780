#pragma once

// Hooks on every tensor that autograd saves in this thread: what torch.autograd.graph.
// saved_tensors_hooks is in Python. libtorch asks its engine for them, so the engine is replaced by
// one that knows them.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace fsdp2::recompute {

class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  /// For one tensor that is about to be saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// While it lives, what this thread saves goes to `hooks`, and to no others.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorHooks* hooks);
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
  ~SavedTensorScope();

 private:
  SavedTensorHooks* outer_;
};

}  // namespace fsdp2::recompute
