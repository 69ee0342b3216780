// Every optimizer of the C++ frontend, as it stands, on shards: the same numbers as on whole
// parameters.
#include "support/ranks.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <vector>

namespace fsdp2 {
namespace {

using Make =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

struct Case {
  const char* name;
  Make make;
};

template <class Optimizer, class Options>
Make maker(Options options) {
  return [options](const std::vector<torch::Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {
      {"SGD", maker<SGD>(SGDOptions(0.1))},
      {"SGD momentum", maker<SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01))},
      {"SGD nesterov", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"Adam amsgrad", maker<Adam>(AdamOptions(0.1).amsgrad(true).weight_decay(0.01))},
      {"AdamW", maker<AdamW>(AdamWOptions(0.1).weight_decay(0.1))},
      {"RMSprop centered",
       maker<RMSprop>(RMSpropOptions(0.01).centered(true).momentum(0.9).weight_decay(0.01))},
      {"Adagrad",
       maker<Adagrad>(AdagradOptions(0.1).lr_decay(0.01).initial_accumulator_value(0.1))},
  };
}

/// Ten steps with the same gradients on whole parameters and on their shards.
void compare(const Case& optimizer, const DeviceMesh& mesh) {
  torch::manual_seed(7);
  const std::vector<std::vector<int64_t>> sizes = {{7, 3}, {5}, {1, 4}, {}};
  std::vector<torch::Tensor> whole, sharded;
  for (const auto& size : sizes) {
    const torch::Tensor value = torch::randn(size);
    whole.push_back(value.clone().requires_grad_());
    const Placement placement = size.empty() ? Replicate() : Shard(0);
    sharded.push_back(distribute_tensor(value, mesh, {placement}).requires_grad_());
  }
  const auto plain = optimizer.make(whole), onshards = optimizer.make(sharded);
  for (int step = 0; step < 10; ++step) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const torch::Tensor grad = torch::randn(sizes[i]);
      whole[i].mutable_grad() = grad;
      sharded[i].mutable_grad() = chunk_tensor(grad, mesh, DTensor(sharded[i]).placements());
    }
    plain->step();
    onshards->step();
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_TRUE(torch::equal(DTensor(sharded[i]).full_tensor(), whole[i]))
        << optimizer.name << ", parameter " << i << " over " << mesh.size() << " ranks";
  }
}

TEST(Optimizers, StepOnShardsAsOnWholeParameters) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (const Case& optimizer : cases()) compare(optimizer, mesh);
    });
  }
}

TEST(Optimizers, FusedKernelsStepShards) {
  testing::on_ranks(3, [](int) {
    torch::manual_seed(7);
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    std::vector<torch::Tensor> whole, parts;  // parameter, gradient and the two moments
    for (int i = 0; i < 4; ++i) {
      whole.push_back(torch::rand({7, 3}));
      parts.push_back(chunk_tensor(whole.back(), mesh, {Shard(0)}));
    }
    for (const auto& t : {whole, parts}) {
      const std::vector<torch::Tensor> steps = {torch::tensor(1.0f)};
      at::_fused_adamw_({t[0]}, {t[1]}, {t[2]}, {t[3]}, {}, steps, 0.1, 0.9, 0.99, 0.1, 1e-8, false,
                        false);
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(torch::allclose(DTensor(parts[i]).full_tensor(), whole[i], 1e-5, 1e-6)) << i;
    }
  });
}

// It flattens parameters into one vector, which shards of different sizes do not make.
TEST(Optimizers, FlatteningIsRefusedNotWrong) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    std::vector<torch::Tensor> parts = {
        chunk_tensor(torch::ones({7, 3}), mesh, {Shard(0)}).requires_grad_(),
        chunk_tensor(torch::ones({5}), mesh, {Shard(0)}).requires_grad_()};
    EXPECT_THROW(torch::nn::utils::parameters_to_vector(parts), c10::Error);
    EXPECT_THROW(torch::nn::utils::parameters_to_vector({parts[1]}), c10::Error);
    EXPECT_THROW(torch::nn::utils::vector_to_parameters(torch::zeros({26}), parts), c10::Error);
    for (const auto& part : parts) part.mutable_grad() = torch::ones_like(part);
    torch::optim::LBFGS optimizer(parts);
    EXPECT_THROW(optimizer.step([] { return torch::zeros({1}); }), c10::Error);
  });
}

}  // namespace
}  // namespace fsdp2
