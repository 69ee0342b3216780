#pragma once

// The state of models and optimizers by name, as torch.distributed.checkpoint.state_dict gives it:
// the names are Python's for the same model, so checkpoints pass between the two. Follows
// pytorch.org/docs/stable/distributed.checkpoint.html.
//
// Getters change nothing: their dicts share memory with model and optimizer, unless asked for full
// or offloaded tensors. Setters check everything on all ranks before they change anything; an error
// on one rank is raised on all. All are collective over the world (getters only if asked for full
// tensors).

#include <fsdp2/dcp_value.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2 {

struct StateDictOptions {
  /// Whole tensors instead of DTensors. A setter takes whole tensors with or without it.
  bool full_state_dict = false;
  /// On the host. With full_state_dict only rank 0 gets them, one by one; others get an empty dict.
  bool cpu_offload = false;
  /// Getters leave frozen parameters out; setters do not miss them.
  bool ignore_frozen_params = false;
  /// Setters: names that are missing or unknown are errors.
  bool strict = true;
  /// Setters: rank 0 alone has the state, whole, and sends it tensor by tensor; what other ranks
  /// pass is ignored. Needs full_state_dict.
  bool broadcast_from_rank0 = false;
  /// "state.layer.weight.exp_avg" and "param_groups.layer.weight.lr" instead of nested dicts.
  /// Setters take both forms.
  bool flatten_optimizer_state_dict = false;
  /// Of the model's state only what lies in these submodules ("encoder"), if any are named; with
  /// or without their names in front (without: one submodule only).
  std::vector<std::string> submodules{};
  bool keep_submodule_prefixes = true;
};

struct IncompatibleKeys {
  std::vector<std::string> missing_keys, unexpected_keys;
};

/// Parameters and buffers. A tied parameter is there under each of its names.
dcp::StateDict get_model_state_dict(const torch::nn::Module& model,
                                    const StateDictOptions& options = {});
/// Copies into the model's tensors, which keep dtype and layout. Values may be plain, whole, or
/// DTensors of any layout. Errors name the key: missing or unknown (strict), another size, a
/// parameter on the meta device. Returns what was missing and unknown.
IncompatibleKeys set_model_state_dict(torch::nn::Module& model, const dcp::StateDict& state,
                                      const StateDictOptions& options = {});

/// {"state": {name: {"step", "exp_avg", ...}}, "param_groups": [{"lr", ..., "params": [names]}]}.
/// Parameters that require gradients and have no state yet have a fresh one in the dict (zeros,
/// step 0), so that it can serve as a template. Groups have all of Python's options; those that C++
/// does not know keep what was loaded, or else Python's defaults. `step` is a 0-dim float32 tensor.
/// Optimizers: Adam, AdamW (also fsdp2::optim's), SGD, RMSprop, Adagrad. Errors: another class; a
/// parameter that the model does not have.
dcp::StateDict get_optimizer_state_dict(const torch::nn::Module& model,
                                        torch::optim::Optimizer& optimizer,
                                        const StateDictOptions& options = {});
/// Errors name the parameter: in strict mode one that requires gradients and has no state or no
/// group in the dict; a state of another size. Error if the dict asks for what this optimizer does
/// not do (maximize; weight decay of Adam's kind in AdamW). State of frozen parameters is taken.
void set_optimizer_state_dict(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                              const dcp::StateDict& state, const StateDictOptions& options = {});

/// Model and optimizer.
std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(const torch::nn::Module& model,
                                                         torch::optim::Optimizer& optimizer,
                                                         const StateDictOptions& options = {});
IncompatibleKeys set_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                const dcp::StateDict& model_state,
                                const dcp::StateDict& optimizer_state,
                                const StateDictOptions& options = {});

/// Model and optimizer as one object that rides in a state dict: dcp::save and dcp::load do the
/// rest. Its keys are "model" and "optim". Loading takes the state that the checkpoint has of
/// frozen parameters too.
///
///   dcp::StateDict state = {{"train", training_state(model.ptr(), optimizer)}, {"epoch", 3}};
std::shared_ptr<dcp::Stateful> training_state(std::shared_ptr<torch::nn::Module> model,
                                              torch::optim::Optimizer& optimizer,
                                              const StateDictOptions& options = {});

}  // namespace fsdp2
