#include "recompute/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

namespace fsdp2::recompute {
namespace {

using torch::autograd::Engine;

thread_local SavedTensorHooks* active_hooks = nullptr;

struct HookingEngine final : Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return active_hooks ? active_hooks->make() : nullptr;
  }
};

Engine& hooking_engine() {
  static auto* engine = new HookingEngine;  // never destroyed, as the engine it replaces
  return *engine;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(&Engine::get_default_engine() == &Engine::get_base_engine(),
                "activation checkpointing cannot replace the autograd engine, as another one was "
                "installed (Python's?): use torch.utils.checkpoint there");
    torch::autograd::set_default_engine_stub(&hooking_engine);
  });
}

}  // namespace

SavedTensorScope::SavedTensorScope(SavedTensorHooks* hooks) {
  install_engine();
  outer_ = std::exchange(active_hooks, hooks);
}

SavedTensorScope::~SavedTensorScope() { active_hooks = outer_; }

}  // namespace fsdp2::recompute
