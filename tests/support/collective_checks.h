#pragma once

// What a backend's collectives give, against what ATen works out in one process.

#include "support/ranks.h"

#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace fsdp2::testing {

using RedOp = c10d::ReduceOp::RedOpType;

inline c10::intrusive_ptr<c10d::Backend> cpu_backend(const ProcessGroup& group) {
  return group->getBackend(c10::kCPU);
}

/// What rank `rank` brings: other values at every place and rank, small enough to be exact.
inline torch::Tensor brought(int rank, int64_t size, at::ScalarType type) {
  const torch::Tensor values = (torch::arange(size, at::kLong) * 7 + rank * 3) % 11 - rank % 2;
  return type == at::kBool ? values.gt(4) : values.to(type);
}

/// Not exact in any sum, so that the order of additions shows.
inline torch::Tensor random_values(int rank, int64_t size, at::ScalarType type) {
  torch::manual_seed(static_cast<uint64_t>(size + rank));
  return torch::randn({size}, at::isComplexType(type) ? at::kComplexDouble : at::kDouble).to(type);
}

inline void expect_same_bits(const torch::Tensor& got, const torch::Tensor& wanted,
                             const std::string& what) {
  EXPECT_TRUE(
      at::equal(got.view({-1}).view(at::kByte), wanted.contiguous().view({-1}).view(at::kByte)))
      << what << " of " << wanted.numel() << " x " << wanted.scalar_type() << " on rank "
      << get_rank();
}

inline bool can_be_reduced(at::ScalarType type, RedOp op) {
  const bool whole = at::isIntegralType(type, true);
  if (op == RedOp::AVG) return !whole;
  if (op >= RedOp::BAND) return whole;
  return op < RedOp::MIN || !at::isComplexType(type);
}

/// By ATen, in the order of `inputs`; fp16 and bf16 summed in fp32 and rounded once. An average is
/// over `ranks`, 0: over the inputs.
inline torch::Tensor reduced(const std::vector<torch::Tensor>& inputs, RedOp op, size_t ranks = 0) {
  using torch::Tensor;
  const at::ScalarType type = inputs[0].scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  const auto input = [&](size_t rank) {
    return narrow ? inputs[rank].to(at::kFloat) : inputs[rank];
  };
  Tensor result = input(0).clone();
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const Tensor next = input(rank);
    if (op == RedOp::SUM || op == RedOp::AVG) result = result + next;
    if (op == RedOp::PRODUCT) result = result * next;
    if (op == RedOp::MIN) result = at::minimum(result, next);
    if (op == RedOp::MAX) result = at::maximum(result, next);
    if (op == RedOp::BAND) result = at::bitwise_and(result, next);
    if (op == RedOp::BOR) result = at::bitwise_or(result, next);
    if (op == RedOp::BXOR) result = at::bitwise_xor(result, next);
  }
  // ATen divides complex numbers by complex ones, which rounds differently.
  const Tensor parts = result.is_complex() ? at::view_as_real(result) : result;
  if (op == RedOp::AVG) parts.div_(static_cast<double>(ranks > 0 ? ranks : inputs.size()));
  return result.to(type);
}

/// all_reduce and reduce_scatter, in place too, of what the ranks bring; to the bit.
inline void check_reductions(c10d::Backend& backend, const std::vector<torch::Tensor>& inputs,
                             const torch::Tensor& wanted, RedOp op) {
  using torch::Tensor;
  const int world = backend.getSize(), rank = backend.getRank();
  const std::string what = "op " + std::to_string(op);
  c10d::AllreduceOptions all_options;
  all_options.reduceOp = op;
  std::vector<Tensor> all = {inputs[rank].clone()};
  backend.allreduce(all, all_options)->wait();
  expect_same_bits(all[0], wanted, "all_reduce, " + what);

  const int64_t each = wanted.numel() / world;
  const Tensor own_part = wanted.narrow(0, each * rank, each);
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  Tensor input = inputs[rank].narrow(0, 0, each * world).clone();
  Tensor output = torch::zeros({each}, input.options());
  backend._reduce_scatter_base(output, input, options)->wait();
  expect_same_bits(output, own_part, "reduce_scatter, " + what);
  expect_same_bits(input, inputs[rank].narrow(0, 0, each * world), "the input");
  Tensor own = input.narrow(0, each * rank, each);
  backend._reduce_scatter_base(own, input, options)->wait();
  expect_same_bits(own, own_part, "reduce_scatter in place, " + what);
}

/// all_gather, in place too.
inline void check_all_gather(c10d::Backend& backend, int64_t size, at::ScalarType type) {
  using torch::Tensor;
  const int world = backend.getSize(), rank = backend.getRank();
  std::vector<Tensor> parts;
  parts.reserve(static_cast<size_t>(world));
  for (int other = 0; other < world; ++other) parts.push_back(brought(other, size, type));
  Tensor input = parts[rank].clone();
  Tensor output = torch::full({world * size}, 9, type);
  backend._allgather_base(output, input)->wait();
  expect_same_bits(output, torch::cat(parts), "all_gather");
  Tensor whole = torch::full({world, size}, 9, type);
  Tensor own = whole[rank].copy_(input);
  backend._allgather_base(whole, own)->wait();
  expect_same_bits(whole, torch::cat(parts), "all_gather in place");
}

/// Sums whose numbers are multiplied before: exact, and the input stays.
inline void check_premultiplied_sums(c10d::Backend& backend, int64_t size) {
  using torch::Tensor;
  const int world = backend.getSize(), rank = backend.getRank();
  double factors = 0;
  for (int other = 0; other < world; ++other) factors += other + 2;
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::makePreMulSum(rank + 2.0);
  std::vector<Tensor> tensors = {torch::full({size}, 3.0)};
  backend.allreduce(tensors, options)->wait();
  EXPECT_TRUE(tensors[0].equal(torch::full({size}, 3 * factors)));
  c10d::ReduceScatterOptions scatter;
  scatter.reduceOp = c10d::makePreMulSum(torch::full({1}, rank + 2.0));
  Tensor input = torch::full({size * world}, 3.0), output = torch::zeros({size});
  backend._reduce_scatter_base(output, input, scatter)->wait();
  EXPECT_TRUE(output.equal(torch::full({size}, 3 * factors)));
  EXPECT_TRUE(input.equal(torch::full({size * world}, 3.0)));
}

/// An all-reduce that has been started, of numbers that say whether it is right.
struct Sum {
  std::vector<torch::Tensor> tensors;
  Work work;

  Sum(const ProcessGroup& group, int64_t size)
      : tensors{torch::full({size}, group->getRank() + 1.0)},
        work(cpu_backend(group)->allreduce(tensors)) {}
  void expect_right(const ProcessGroup& group) const {
    const int ranks = group->getSize();
    EXPECT_TRUE(tensors[0].equal(torch::full_like(tensors[0], ranks * (ranks + 1) / 2.0)));
  }
};

}  // namespace fsdp2::testing
