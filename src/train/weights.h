#pragma once

// The parameters of a module as safetensors, whole tensors under their parameter names or others.
// Modules may be sharded. Collective over the world, if there is one; an error on one rank is
// raised on all.

#include <fsdp2/safetensors_files.h>

#include <torch/nn/module.h>

#include <functional>
#include <string>

namespace fsdp2::train {

struct LoadWeightsOptions {
  safetensors::NameMap name{};  // what a parameter is called in the file
  /// Names in the file that no parameter needs to have.
  std::function<bool(const std::string&)> passes_over{};
};

/// From a file or a folder. Error naming file and parameter, before anything is written, if one is
/// missing, has another size, or a dtype that would have to be rounded; and afterwards if the file
/// has a tensor that the module lacks.
void load_weights(torch::nn::Module& module, const std::string& path,
                  const LoadWeightsOptions& options = {});

/// Into one file.
void save_weights(const torch::nn::Module& module, const std::string& path);

struct SaveWeightsOptions {
  safetensors::NameMap name{};
  torch::ScalarType dtype = torch::kFloat32;
  uint64_t most_bytes = 5'000'000'000;  // a file
};
/// Into a folder.
void save_weights(const torch::nn::Module& module, const std::string& folder,
                  const SaveWeightsOptions& options);

}  // namespace fsdp2::train
