#include "train/init.h"

#include "train/random.h"

#include <torch/torch.h>

#include <cmath>

namespace fsdp2::train {

torch::Tensor init_values(const std::string& name, uint64_t seed, int64_t start, int64_t count,
                          int64_t layers) {
  if (name.ends_with("norm.weight")) return torch::ones({count});
  double bound = 0.02 * std::sqrt(3.0);
  if (name.ends_with("wo.weight") || name.ends_with("w2.weight")) bound /= std::sqrt(2.0 * layers);
  const auto a = static_cast<float>(bound);
  const uint64_t key = fnv1a64(name) ^ (seed * kGolden);
  auto values = torch::empty({count});
  float* out = values.data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t z = mix64(key + (static_cast<uint64_t>(start + i) + 1) * kGolden);
    const auto r = static_cast<int32_t>(z >> 40) - 8388608;  // 24 bits: exact in float
    out[i] = static_cast<float>(r) * 0x1p-23F * a;
  }
  return values;
}

void init_weights(torch::nn::Module& module, uint64_t seed, int64_t layers) {
  torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    auto& parameter = item.value();
    parameter.copy_(
        init_values(item.key(), seed, 0, parameter.numel(), layers).view(parameter.sizes()));
  }
}

}  // namespace fsdp2::train
