#pragma once

// A module's weights as one safetensors file, whole tensors under their parameter names.

#include <fsdp2/safetensors.h>

#include <torch/nn/module.h>

#include <string>

namespace fsdp2::train {

/// Copies into a module that is not sharded yet. Error naming file and parameter, before anything
/// is written, if a parameter is missing or has another size or dtype, or the file has one that the
/// module lacks.
void load_weights(torch::nn::Module& module, const std::string& path);

/// Rank 0 writes, gathering sharded parameters one by one. Collective; an error on rank 0 is raised
/// on all.
void save_weights(const torch::nn::Module& module, const std::string& path,
                  const safetensors::Metadata& metadata = {});

}  // namespace fsdp2::train
