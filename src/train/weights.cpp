#include "train/weights.h"

#include <fsdp2/safetensors_files.h>

#include <torch/torch.h>

namespace fsdp2::train {

void load_weights(torch::nn::Module& module, const std::string& path) {
  torch::NoGradGuard no_grad;
  const safetensors::Reader reader(path);
  auto parameters = module.named_parameters();
  for (const auto& entry : reader.entries()) {
    const auto* parameter = parameters.find(entry.name);
    TORCH_CHECK_VALUE(parameter != nullptr, path, ": the model has no parameter called ",
                      entry.name);
    TORCH_CHECK_VALUE(parameter->sizes() == entry.sizes, path, ": ", entry.name, " has size ",
                      c10::IntArrayRef(entry.sizes), ", the model's has ", parameter->sizes());
    TORCH_CHECK_VALUE(parameter->scalar_type() == entry.dtype, path, ": ", entry.name, " is ",
                      entry.dtype, ", the model's is ", parameter->scalar_type());
  }
  for (const auto& item : parameters) {
    TORCH_CHECK_VALUE(reader.contains(item.key()), path, ": the parameter ", item.key(),
                      " is missing");
  }
  for (auto& item : parameters) item.value().copy_(reader.read(item.key()));
}

void save_weights(const torch::nn::Module& module, const std::string& path,
                  const safetensors::Metadata& metadata) {
  dcp::StateDict state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  safetensors::save_file(state, path, metadata);
}

}  // namespace fsdp2::train
