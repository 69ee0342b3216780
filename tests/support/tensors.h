#pragma once

// Tensors as what a test compares.

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <vector>

namespace fsdp2::testing {

/// The whole tensor, differentiable; a collective for a DTensor.
inline torch::Tensor whole_of(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

inline std::vector<int64_t> list_of(const torch::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

}  // namespace fsdp2::testing
