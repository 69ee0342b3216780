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
      {"SGD dampening", maker<SGD>(SGDOptions(0.1).momentum(0.5).dampening(0.5))},
      {"SGD nesterov", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"Adam amsgrad", maker<Adam>(AdamOptions(0.1).amsgrad(true).weight_decay(0.01))},
      {"Adam", maker<Adam>(AdamOptions(0.1))},
      {"AdamW amsgrad", maker<AdamW>(AdamWOptions(0.1).amsgrad(true))},
      {"RMSprop", maker<RMSprop>(RMSpropOptions(0.01))},
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

TEST(Optimizers, StateLiesAsItsParameter) {
  testing::on_ranks(3, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    torch::Tensor part = chunk_tensor(torch::ones({7, 3}), mesh, {Shard(0)}).requires_grad_();
    torch::optim::Adam adam({part}, torch::optim::AdamOptions(0.1).amsgrad(true));
    torch::optim::RMSprop rmsprop({part}, torch::optim::RMSpropOptions(0.1).centered(true));
    torch::optim::SGD sgd({part}, torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::Adagrad adagrad({part}, torch::optim::AdagradOptions(0.1));
    part.mutable_grad() = torch::ones_like(part);
    for (torch::optim::Optimizer* each :
         std::vector<torch::optim::Optimizer*>{&adam, &rmsprop, &sgd, &adagrad}) {
      each->step();
    }
    const auto state = [&](torch::optim::Optimizer& optimizer) {
      return optimizer.state().at(part.unsafeGetTensorImpl()).get();
    };
    const auto* a = static_cast<torch::optim::AdamParamState*>(state(adam));
    const auto* r = static_cast<torch::optim::RMSpropParamState*>(state(rmsprop));
    const auto* s = static_cast<torch::optim::SGDParamState*>(state(sgd));
    const auto* g = static_cast<torch::optim::AdagradParamState*>(state(adagrad));
    for (const torch::Tensor& tensor :
         {a->exp_avg(), a->exp_avg_sq(), a->max_exp_avg_sq(), r->square_avg(), r->grad_avg(),
          s->momentum_buffer(), g->sum()}) {
      EXPECT_EQ(DTensor(tensor).placements(), Placements{Shard(0)});
      EXPECT_EQ(DTensor(tensor).to_local().size(0), rank < 2 ? 3 : 1);
    }
  });
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

}  // namespace
}  // namespace fsdp2
