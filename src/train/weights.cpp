#include "train/weights.h"

#include "checkpoint/near_names.h"

#include <torch/torch.h>

namespace fsdp2::train {
namespace {

dcp::StateDict parameters_of(const torch::nn::Module& module) {
  dcp::StateDict state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  return state;
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::string& path,
                  const LoadWeightsOptions& options) {
  dcp::StateDict state = parameters_of(module);
  auto unexpected = safetensors::load_files(state, path, {.name = options.name}).unexpected;
  if (options.passes_over) std::erase_if(unexpected, options.passes_over);
  TORCH_CHECK_VALUE(unexpected.empty(), path, ": the model has no parameter called ",
                    dcp::short_list(unexpected));
}

void save_weights(const torch::nn::Module& module, const std::string& path) {
  safetensors::save_file(parameters_of(module), path, {{"format", "pt"}});
}

void save_weights(const torch::nn::Module& module, const std::string& folder,
                  const SaveWeightsOptions& options) {
  const torch::NoGradGuard no_grad;
  dcp::StateDict state = parameters_of(module);
  for (auto& [name, value] : state) value = value.to_tensor().to(options.dtype);
  safetensors::save_files(state, folder, {.most_bytes = options.most_bytes, .name = options.name});
}

}  // namespace fsdp2::train
