// Hooks on what parameters() returns run once a backward, on the reduced gradient; hooks on a
// module's own members see this rank's whole gradient before the reduction.

#include "support/ranks.h"
#include "support/twins.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp2::testing::parameter_hooks {
namespace {

using torch::Tensor;

class ParameterHooks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ParameterHooks, ::testing::Values(1, 2, 3));

Tensor loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).sum();
}

TEST_P(ParameterHooks, RunAfterTheReductionAndMayReplaceTheGradient) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    std::array<int, 2> calls = {0, 0};
    std::array<Tensor, 2> seen;
    std::array<unsigned, 2> handle;
    for (size_t i = 0; i < 2; ++i) {
      Tensor weight = (*twins.both()[i])->named_parameters()["b.weight"];
      handle[i] = weight.register_hook([&, i](Tensor gradient) {
        ++calls[i];
        seen[i] = full(gradient);
        return gradient * 3;
      });
      weight.register_hook([](Tensor gradient) { return gradient + 1; });
      weight.register_hook([](Tensor) { return Tensor(); });
    }
    twins.backward(loss);
    EXPECT_EQ(calls[0], 1);
    EXPECT_EQ(calls[1], 1);
    EXPECT_LE(difference(seen[0], seen[1]), 1e-5);
    twins.expect_same(1e-4);
    twins.backward(loss);  // accumulates what the hooks made of the second gradient alone
    twins.expect_same(1e-4);
    EXPECT_EQ(calls[1], 2);
    for (size_t i = 0; i < 2; ++i) {
      (*twins.both()[i])->named_parameters()["b.weight"].remove_hook(handle[i]);
    }
    twins.backward(loss);
    twins.expect_same(1e-4);
    EXPECT_EQ(calls[1], 2);
  });
}

TEST_P(ParameterHooks, OnMembersSeeTheLocalGradient) {
  on_ranks(GetParam(), [](int rank) {
    torch::nn::Linear module(torch::nn::LinearOptions(5, 3).bias(false));
    fully_shard(module);
    Tensor seen;
    module->weight.register_hook([&](Tensor gradient) {
      seen = gradient.clone();
      return gradient * 2;
    });
    module(torch::full({2, 5}, rank + 1.0)).sum().backward();
    EXPECT_EQ(difference(seen, torch::full({3, 5}, 2.0 * (rank + 1))), 0);
    const double mean = (get_world_size() + 1) / 2.0;
    EXPECT_LE(difference(full(module->parameters()[0].grad()), torch::full({3, 5}, 4 * mean)),
              1e-6);
  });
}

struct StepAtOnce final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& parameter) override {
    torch::NoGradGuard no_grad;
    Tensor p = parameter;
    p.sub_(p.grad(), 0.01);
    p.mutable_grad().reset();
  }
};

TEST_P(ParameterHooks, PostAccumulateHooksStepTheOptimizerInsideBackward) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    for (auto* module : twins.both()) {
      for (const Tensor& p : (*module)->parameters()) {
        torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<StepAtOnce>());
      }
    }
    for (int step = 0; step < 3; ++step) twins.backward(loss);
    twins.expect_same(rounding_bound());
    EXPECT_FALSE(twins.sharded->parameters()[0].grad().defined());
  });
}

}  // namespace
}  // namespace fsdp2::testing::parameter_hooks
