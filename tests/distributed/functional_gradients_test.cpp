// autograd::grad and frozen modules: whoever asked for no gradient of the parameters gets none on
// the shards, so that an optimizer with weight decay leaves them alone.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::functional_gradients {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class FunctionalGradients : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FunctionalGradients, ::testing::Values(1, 2, 3));

void expect_no_gradients(TwoLinear& module) {
  for (const auto& item : module->named_parameters()) {
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
  }
}

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

TEST_P(FunctionalGradients, OfMembersAreLocalAndLeaveShardsAlone) {
  on_ranks(GetParam(), [](int rank) {
    for (bool apart : {false, true}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, apart);
      torch::optim::AdamW optimizer(twins.sharded->parameters(),
                                    torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      std::array<std::vector<Tensor>, 2> gradients;
      for (size_t i = 0; i < 2; ++i) {
        auto& module = *twins.both()[i];
        gradients[i] = torch::autograd::grad({module->forward(input(rank)).pow(2).sum()},
                                             {module->a->weight, module->b->bias});
      }
      for (size_t k = 0; k < 2; ++k) EXPECT_EQ(difference(gradients[0][k], gradients[1][k]), 0);
      expect_no_gradients(twins.sharded);
      optimizer.step();
      twins.expect_same(0, /*gradients=*/false);
      twins.backward([](TwoLinear& m, int r) { return m->forward(input(r)).pow(2).sum(); });
      twins.expect_same(get_world_size() == 1 ? 0 : 5e-6);
    }
  });
}

TEST_P(FunctionalGradients, OfInputsOnly) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    std::array<Tensor, 2> gradients;
    for (size_t i = 0; i < 2; ++i) {
      Tensor x = input(rank).requires_grad_();
      gradients[i] = torch::autograd::grad({(*twins.both()[i])->forward(x).pow(2).sum()}, {x})[0];
    }
    EXPECT_EQ(difference(gradients[0], gradients[1]), 0);
    expect_no_gradients(twins.sharded);
  });
}

TEST_P(FunctionalGradients, OfParametersSaysTheyWereNotUsed) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    wrap_layers(module, true);
    Tensor loss = module->forward(input(rank)).sum();
    EXPECT_THAT(error_of([&] { torch::autograd::grad({loss}, module->parameters()); }),
                HasSubstr("not have been used in the graph"));
  });
}

TEST_P(FunctionalGradients, BackwardIntoChosenMembers) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    auto chosen = [](TwoLinear& m) { return std::vector<Tensor>{m->a->weight}; };
    Tensor sum;
    for (int r = 0; r < get_world_size(); ++r) {
      Tensor part = twins.plain->forward(input(r)).pow(2).sum() / get_world_size();
      sum = sum.defined() ? sum + part : part;
    }
    sum.backward({}, std::nullopt, false, chosen(twins.plain));
    twins.sharded->forward(input(get_rank()))
        .pow(2)
        .sum()
        .backward({}, std::nullopt, false, chosen(twins.sharded));
    twins.expect_same(5e-6);
  });
}

TEST_P(FunctionalGradients, FrozenModulesPassGradientsThrough) {
  on_ranks(GetParam(), [](int rank) {
    for (bool before : {true, false}) {
      Twins<TwoLinear> twins;
      auto freeze = [&] {
        for (auto* module : twins.both()) {
          for (const Tensor& p : (*module)->parameters()) p.set_requires_grad(false);
        }
      };
      if (before) freeze();
      wrap_layers(twins.sharded, true);
      if (!before) freeze();
      torch::optim::AdamW optimizer(twins.sharded->parameters(),
                                    torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      std::array<Tensor, 2> x = {input(rank).requires_grad_(), input(rank).requires_grad_()};
      reset_collective_counts();
      for (size_t i = 0; i < 2; ++i) (*twins.both()[i])->forward(x[i]).pow(2).sum().backward();
      EXPECT_EQ(difference(x[0].grad(), x[1].grad()), 0);
      EXPECT_EQ(collective_counts().reduce_scatters, 0);
      expect_no_gradients(twins.sharded);
      optimizer.step();
      twins.expect_same(0, /*gradients=*/false);
    }
  });
}

TEST_P(FunctionalGradients, FreezingAndThawingThroughTheMember) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    auto loss = [](TwoLinear& m, int r) { return m->forward(input(r)).pow(2).sum(); };
    for (bool trainable : {false, true, false}) {
      for (auto* module : twins.both()) (*module)->b->weight.set_requires_grad(trainable);
      twins.zero_grad();
      twins.backward(loss);
      twins.expect_same(rounding_bound());
      EXPECT_EQ(twins.sharded->named_parameters()["b.weight"].requires_grad(), trainable);
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::functional_gradients
