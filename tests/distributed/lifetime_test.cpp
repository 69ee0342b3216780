// Modules, handles, shards and graphs may go in any order.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::lifetime {
namespace {

using torch::Tensor;

class Lifetime : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Lifetime, ::testing::Values(1, 2));

TEST_P(Lifetime, ModuleGoneBeforeBackward) {
  on_ranks(GetParam(), [](int) {
    for (bool apart : {false, true}) {
      Tensor loss, x = torch::randn({2, 5}).requires_grad_();
      Tensor expected, x_plain = x.detach().clone().requires_grad_();
      {
        Twins<TwoLinear> twins;
        wrap_layers(twins.sharded, apart);
        loss = twins.sharded->forward(x).pow(2).sum();
        expected = twins.plain->forward(x_plain).pow(2).sum();
      }
      loss.backward();
      expected.backward();
      EXPECT_EQ(difference(x.grad(), x_plain.grad()), 0);
    }
  });
}

TEST_P(Lifetime, ShardsOutliveTheModule) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    torch::optim::SGD plain(twins.plain->parameters(), 0.1), ours(twins.sharded->parameters(), 0.1);
    const Tensor shard = twins.sharded->a->named_parameters()["weight"];
    const Tensor whole = twins.plain->a->weight;
    const Tensor x = torch::ones({2, 5});
    Tensor loss = twins.sharded->forward(x).pow(2).sum();
    twins.plain->forward(x).pow(2).sum().backward();
    twins.sharded = nullptr;
    loss.backward();
    loss.reset();
    plain.step();
    ours.step();
    EXPECT_LE(difference(full(shard), whole), 1e-6);
    EXPECT_LE(difference(full(shard.grad()), whole.grad()), 1e-6);
  });
}

TEST_P(Lifetime, PartsGoInAnyOrder) {
  on_ranks(GetParam(), [](int) {
    for (int order = 0; order < 6; ++order) {
      TwoLinear module;
      wrap_layers(module, true);
      FSDPModule controls = as_fsdp(*module);
      UnshardHandle handle = as_fsdp(*module->a).unshard(/*async_op=*/true);
      Tensor member = module->a->weight, shard = module->a->parameters()[0];
      Tensor graph = module->forward(torch::ones({2, 5})).sum();
      std::vector<std::function<void()>> drops = {
          [&] { module = nullptr; }, [&] { member.reset(); }, [&] { shard.reset(); },
          [&] { graph.reset(); },    [&] { handle.wait(); },
      };
      std::rotate(drops.begin(), drops.begin() + order % 5, drops.end());
      for (auto& drop : drops) drop();
      EXPECT_NE(error_of([&] { controls.unshard(); }), "");
    }
  });
}

TEST_P(Lifetime, ALayerTakenOutOfItsParent) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    torch::nn::Linear layer = twins.sharded->a, plain = twins.plain->a;
    twins.sharded = nullptr;
    const Tensor x = torch::ones({2, 5});
    layer(x).pow(2).sum().backward();
    plain(x).pow(2).sum().backward();
    expect_same_module(*layer, *plain, get_world_size() == 1 ? 0 : 1e-6);
  });
}

TEST_P(Lifetime, ManyModulesOneAfterAnother) {
  on_ranks(GetParam(), [](int) {
    for (int i = 0; i < 30; ++i) {  // addresses are reused
      torch::manual_seed(i);
      Twins<TwoLinear> twins;
      EXPECT_FALSE(is_fsdp(*twins.sharded));
      wrap_layers(twins.sharded, i % 2);
      twins.backward(
          [](TwoLinear& m, int r) { return m->forward(torch::full({1, 5}, r + 1.0)).sum(); });
      twins.expect_same(rounding_bound());
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::lifetime
