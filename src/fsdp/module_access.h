#pragma once

#include <torch/nn/module.h>

namespace fsdp2::fsdp {

/// The registry of a module's own parameters, which torch keeps protected.
inline torch::OrderedDict<std::string, torch::Tensor>& registered_parameters(
    torch::nn::Module& module) {
  struct Access : torch::nn::Module {
    static auto member() { return &Access::parameters_; }
  };
  return module.*Access::member();
}

}  // namespace fsdp2::fsdp
