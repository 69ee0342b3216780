#include "train/weights.h"

#include "train/world.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <exception>

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
  torch::NoGradGuard no_grad;
  const auto parameters = module.named_parameters();
  agree("saving " + path, [&] {
    std::unique_ptr<safetensors::Writer> writer;
    std::exception_ptr failure;
    const auto on_rank_0 = [&](const auto& write) {
      if (get_rank() != 0 || failure) return;
      try {
        write();
      } catch (...) {
        failure =
            std::current_exception();  // the other ranks still gather: leave the loop with them
      }
    };
    on_rank_0([&] {
      std::vector<safetensors::Entry> entries;
      for (const auto& item : parameters) {
        entries.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
      }
      writer = std::make_unique<safetensors::Writer>(path, entries, metadata);
    });
    for (const auto& item : parameters) {
      const auto& parameter = item.value();
      const auto whole = is_dtensor(parameter) ? DTensor(parameter).full_tensor() : parameter;
      on_rank_0([&] { writer->write(whole); });
    }
    on_rank_0([&] { writer->commit(); });
    if (failure) std::rethrow_exception(failure);
  });
}

}  // namespace fsdp2::train
