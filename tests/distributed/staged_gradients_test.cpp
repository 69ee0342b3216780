// Gradients that move, as they come, to memory that ranks of a host share: nobody sees that they
// did.

#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::staged_gradients {
namespace {

using torch::Tensor;

class StagedGradients : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, StagedGradients, ::testing::Values(1, 2, 3, 4));

/// One layer before, and one after, the one of another root.
struct AroundImpl : torch::nn::Module {
  AroundImpl()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        second(register_module("second", torch::nn::Linear(7, 3))) {}
  torch::nn::Linear first, second;
};
TORCH_MODULE(Around);

struct TwoRootsImpl : torch::nn::Module {
  TwoRootsImpl()
      : outer(register_module("outer", Around())),
        inner(register_module("inner", torch::nn::Linear(7, 7))) {}
  Around outer;
  torch::nn::Linear inner;
};
TORCH_MODULE(TwoRoots);

/// While the gradients of the outer root come, one by one, those of the inner one are reduced.
TEST_P(StagedGradients, OfOneModelGiveWayToThoseOfAnother) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoRoots> twins;
    fully_shard(twins.sharded->outer);
    fully_shard(twins.sharded->inner);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([&](TwoRoots& module, int rank) {
        torch::manual_seed(rank + 10 * step);
        const Tensor h = module->outer->first(torch::randn({3, 5})).tanh();
        return module->outer->second(module->inner(h).tanh()).pow(2).mean();
      });
      twins.expect_same(1e-5);
    }
  });
}

TEST_P(StagedGradients, ALayerUsedTwiceAddsUp) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    fully_shard(twins.sharded);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([&](TwoLinear& module, int rank) {
        torch::manual_seed(rank + 10 * step);
        Tensor x = torch::randn({3, 5});
        return (module->b(module->a(x)) + module->b(module->a(x * 2))).pow(2).mean();
      });
      twins.expect_same(1e-5);
    }
  });
}

TEST_P(StagedGradients, FrozenWhileTheyComeAreLeftOut) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    fully_shard(module);
    const auto backward = [&](bool freeze) {
      Tensor h = module->a(torch::full({3, 5}, rank + 1.0));
      if (freeze)
        h.register_hook([&](const Tensor&) { module->parameters()[2].set_requires_grad(false); });
      module->b(h).sum().backward();
    };
    backward(false);
    backward(false);
    const Tensor expected = DTensor(module->parameters()[0].grad()).full_tensor() / 2;
    module->zero_grad();
    backward(true);
    EXPECT_FALSE(module->parameters()[2].grad().defined());
    EXPECT_TRUE(expected.allclose(DTensor(module->parameters()[0].grad()).full_tensor()));
  });
}

/// The memory of gradients is used again, but not while somebody has them.
TEST_P(StagedGradients, OfThePastStayAsTheyWere) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    fully_shard(module);
    std::vector<Tensor> kept, values;
    for (int step = 0; step < 4; ++step) {
      module->zero_grad();
      module->forward(torch::full({3, 5}, rank + step + 1.0)).pow(2).sum().backward();
      const DTensor gradient(module->parameters()[0].grad());
      if (step == 1) kept.push_back(gradient);
      if (step == 2) kept.push_back(gradient.to_local().view({-1}));
      if (step == 1 || step == 2) values.push_back(gradient.to_local().clone());
    }
    EXPECT_TRUE(DTensor(kept[0]).to_local().equal(values[0]));
    EXPECT_TRUE(kept[1].equal(values[1].view({-1})));
  });
}

TEST_P(StagedGradients, AFailedBackwardLeavesNone) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    fully_shard(twins.sharded);
    const auto loss = [](TwoLinear& module, int rank) {
      torch::manual_seed(rank);
      return module->b(module->a(torch::randn({3, 5}))).pow(2).mean();
    };
    twins.backward(loss);
    twins.zero_grad();
    Tensor h = twins.sharded->a(torch::randn({3, 5}));
    h.register_hook([](const Tensor&) { throw std::runtime_error("mine"); });
    EXPECT_THROW(twins.sharded->b(h).sum().backward(), std::runtime_error);
    twins.backward(loss);
    twins.expect_same(1e-5);
  });
}

}  // namespace
}  // namespace fsdp2::testing::staged_gradients
