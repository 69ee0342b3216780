#pragma once

// Training a sharded module next to the plain one.

#include "support/tensors.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <string>

namespace fsdp2::testing {

inline torch::Tensor full(const torch::Tensor& tensor) {
  torch::NoGradGuard no_grad;
  return whole_of(tensor).detach();
}

/// Copies values between modules of one structure, before wrapping.
inline void copy_values(torch::nn::Module& to, const torch::nn::Module& from) {
  torch::NoGradGuard no_grad;
  auto target = to.named_parameters();
  for (const auto& item : from.named_parameters()) target[item.key()].copy_(item.value());
  auto buffers = to.named_buffers();
  for (const auto& item : from.named_buffers()) buffers[item.key()].copy_(item.value());
}

/// Largest absolute difference; infinite when sizes or definedness differ.
inline double difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  if (a.defined() != b.defined() || a.sizes() != b.sizes()) return INFINITY;
  if (a.numel() == 0) return 0;
  const auto wide = a.is_complex() ? torch::kComplexDouble : torch::kDouble;
  return (a.detach().to(wide) - b.detach().to(wide)).abs().max().item<double>();
}

/// How far a sharded float32 module may be from the plain one: sums are split from two ranks on.
inline double rounding_bound() { return get_world_size() == 1 ? 0 : 1e-5; }

/// Parameters and gradients of a sharded module, gathered, against the plain one. `bound` 0 asks
/// for the same bits.
inline void expect_same_module(const torch::nn::Module& sharded, const torch::nn::Module& plain,
                               double bound, bool gradients = true) {
  const auto ours = sharded.named_parameters();
  for (const auto& item : plain.named_parameters()) {
    const torch::Tensor& mine = ours[item.key()];
    EXPECT_LE(difference(full(mine), item.value()), bound) << "parameter " << item.key();
    if (!gradients) continue;
    const torch::Tensor& grad = item.value().grad();
    ASSERT_EQ(mine.grad().defined(), grad.defined()) << "gradient of " << item.key();
    if (grad.defined()) {
      EXPECT_LE(difference(full(mine.grad()), grad), bound) << "gradient of " << item.key();
    }
  }
}

/// The mean of a scalar over all ranks.
inline double mean_over_ranks(const torch::Tensor& value) {
  torch::Tensor sum = value.detach().to(torch::kDouble).reshape({1}).clone();
  if (get_world_size() > 1) wait(all_reduce(sum, ReduceOp::kSum, world_group()));
  return sum.item<double>() / get_world_size();
}

}  // namespace fsdp2::testing
