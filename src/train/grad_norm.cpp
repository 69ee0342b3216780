#include "train/grad_norm.h"

#include <torch/torch.h>

namespace fsdp2::train {

double clip_grads(const std::vector<torch::Tensor>& parameters, double clip) {
  if (clip > 0) return torch::nn::utils::clip_grad_norm_(parameters, clip);
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> norms;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) norms.push_back(parameter.grad().norm(2));
  }
  return norms.empty() ? 0.0 : torch::stack(norms).norm(2).item<double>();
}

}  // namespace fsdp2::train
