#pragma once

// Options and state of libtorch's optimizers under the names that Python gives them.

#include <fsdp2/dcp_value.h>

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

namespace fsdp2::dcp {

/// One class of optimizers.
class OptimizerFields {
 public:
  /// Error if the class is not known.
  static const OptimizerFields& of(const torch::optim::Optimizer& optimizer);
  virtual ~OptimizerFields() = default;

  /// All of Python's, those that C++ lacks with Python's defaults.
  virtual StateDict options(const torch::optim::Optimizer& optimizer,
                            torch::optim::OptimizerOptions& options) const = 0;
  /// Whether C++ has it.
  virtual bool has_option(const std::string& name) const = 0;
  /// Sets what it knows; error if the value is of another kind. Others are the caller's.
  virtual void set_options(torch::optim::OptimizerOptions& options,
                           const StateDict& values) const = 0;

  virtual StateDict state(torch::optim::OptimizerParamState& state) const = 0;
  /// What a parameter without state would have before its first step.
  virtual StateDict fresh_state(const torch::Tensor& parameter,
                                torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state(
      const StateDict& values) const = 0;
};

}  // namespace fsdp2::dcp
