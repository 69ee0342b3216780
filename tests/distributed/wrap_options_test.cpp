// The arguments of fully_shard: where parameters go, how far they are freed, which are left alone.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::wrap_options {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class WrapOptions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, WrapOptions, ::testing::Values(1, 2, 3, 4));

Tensor loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

/// Three steps of AdamW with clipping, sharded beside plain.
template <class M, class Loss>
void expect_trains_alike(Twins<M>& twins, Loss&& of, double bound) {
  torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
      ours(twins.sharded->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    twins.zero_grad();
    twins.backward(of);
    twins.expect_same(bound);
    plain.step();
    ours.step();
  }
  twins.expect_same(bound, /*gradients=*/false);
}

TEST_P(WrapOptions, ReshardingToFewerRanksGathersAmongThemInBackward) {
  const int world = GetParam();
  for (int64_t ranks = 1; ranks <= world; ++ranks) {
    if (world % ranks != 0) continue;
    on_ranks(world, [&](int rank) {
      Twins<TwoLinear> twins;
      FullyShardOptions options;
      options.reshard_after_forward = ranks;
      wrap_layers(twins.sharded, options);
      expect_trains_alike(twins, loss, rounding_bound());
      torch::manual_seed(100 + rank);
      Tensor value = twins.sharded->forward(torch::randn({3, 5}).requires_grad_()).sum();
      EXPECT_EQ(as_fsdp(*twins.sharded->a).is_unsharded(), ranks == 1 && world > 1);
      reset_collective_counts();
      value.backward();
      // b was still whole; a comes back from its neighbours.
      EXPECT_EQ(collective_counts().all_gathers, ranks == 1 ? 0 : 1);
    });
  }
}

TEST_P(WrapOptions, ShardsKeptAfterForwardAreDroppedWhenParametersChange) {
  on_ranks(4, [](int) {
    Twins<TwoLinear> twins;
    FullyShardOptions options;
    options.reshard_after_forward = 2;
    wrap_layers(twins.sharded, options);
    torch::NoGradGuard no_grad;
    const Tensor x = torch::ones({2, 5});
    twins.sharded->forward(x);
    for (TwoLinear* module : twins.both())
      for (Tensor& parameter : (*module)->parameters()) parameter.mul_(2);
    EXPECT_LE(difference(twins.sharded->forward(x), twins.plain->forward(x)), 1e-6);
    for (Tensor& parameter : twins.sharded->parameters()) DTensor(parameter).to_local().mul_(0.5);
    for (Tensor& parameter : twins.plain->parameters()) parameter.mul_(0.5);
    EXPECT_LE(difference(twins.sharded->forward(x), twins.plain->forward(x)), 1e-6);
  });
}

TEST(WrapOptionsErrors, ANumberToReshardToMustBeAFactor) {
  on_ranks(4, [](int) {
    TwoLinear module;
    FullyShardOptions options;
    for (int64_t ranks : {0, 3, 5, 8, -2}) {
      options.reshard_after_forward = ranks;
      EXPECT_THAT(error_of([&] { fully_shard(module, options); }),
                  AllOf(HasSubstr("a factor of 4"), HasSubstr("it is " + std::to_string(ranks))));
    }
    EXPECT_FALSE(is_fsdp(*module));
  });
}

/// Sizes that 1 to 4 ranks divide in the second dimension only.
struct OddRowsImpl : torch::nn::Module {
  Tensor w, v, scale;
  OddRowsImpl() {
    w = register_parameter("w", torch::randn({5, 12}));
    v = register_parameter("v", torch::randn({7, 3, 12}));
    scale = register_parameter("scale", torch::tensor(0.5));
  }
  Tensor forward(const Tensor& x) { return x.mm(w).mul(scale).mm(v.sum(1).t()); }
};
TORCH_MODULE(OddRows);

Tensor odd_loss(OddRows& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

TEST_P(WrapOptions, PlacementsOnOtherDimensions) {
  on_ranks(GetParam(), [](int) {
    Twins<OddRows> twins;
    FullyShardOptions options;
    options.shard_placement_fn = [](const Tensor& parameter) -> std::optional<ShardPlacement> {
      if (parameter.dim() == 2) return Shard(1);
      if (parameter.dim() == 3) return Shard(-1);
      return std::nullopt;
    };
    fully_shard(twins.sharded, options);
    const auto parameters = twins.sharded->named_parameters();
    EXPECT_EQ(DTensor(parameters["w"]).placements(), Placements{Shard(1)});
    EXPECT_EQ(DTensor(parameters["v"]).placements(), Placements{Shard(2)});
    EXPECT_EQ(DTensor(parameters["w"]).to_local().size(1), 12 / get_world_size());
    expect_trains_alike(twins, odd_loss, 10 * rounding_bound());
  });
}

TEST_P(WrapOptions, SmallParametersStayWhole) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    FullyShardOptions options;
    options.replicate_below = 6;
    fully_shard(twins.sharded, options);
    const auto parameters = twins.sharded->named_parameters();
    EXPECT_EQ(DTensor(parameters["a.bias"]).placements(), Placements{Replicate()});
    EXPECT_EQ(DTensor(parameters["a.weight"]).placements(), Placements{Shard(0)});
    expect_trains_alike(twins, loss, rounding_bound());
  });
}

TEST(WrapOptionsMeshes, AParameterWithAMeshOfItsOwn) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    const DeviceMesh all = init_device_mesh("cpu", {4});
    torch::manual_seed(1);
    TwoLinear module;
    FullyShardOptions options;
    options.mesh = all;
    options.shard_placement_fn = [&](const Tensor& parameter) -> std::optional<ShardPlacement> {
      if (parameter.is_same(module->b->weight)) return ShardPlacement(Shard(0), mesh["shard"]);
      return std::nullopt;
    };
    const Tensor before = module->b->weight.detach().clone();
    FSDPModule controls = fully_shard(module, options);
    const auto parameters = module->named_parameters();
    EXPECT_EQ(DTensor(parameters["a.weight"]).device_mesh(), all);
    EXPECT_EQ(DTensor(parameters["b.weight"]).device_mesh(), mesh["shard"]);
    EXPECT_EQ(controls.parameter_names().size(), 4);

    // w.sum() * (rank + 1): the mean over {0, 1} is 1.5, over {2, 3} 3.5, over all 2.5.
    (module->b->weight.sum() * (rank + 1.0) + module->a->weight.sum() * (rank + 1.0)).backward();
    EXPECT_LE(
        difference(full(parameters["b.weight"].grad()), torch::full({5, 5}, rank < 2 ? 1.5 : 3.5)),
        0);
    EXPECT_LE(difference(full(parameters["a.weight"].grad()), torch::full({5, 5}, 2.5)), 0);
    EXPECT_LE(difference(full(parameters["b.weight"]), before), 0);

    EXPECT_THAT(error_of([&] { controls.set_all_reduce_hook([](const Tensor&) {}); }),
                HasSubstr("several meshes"));
  });
}

TEST(WrapOptionsErrors, PlacementsThatDoNotFit) {
  on_ranks(2, [](int) {
    OddRows module;
    FullyShardOptions options;
    const auto error = [&](const ShardPlacement& placement) {
      options.shard_placement_fn = [&](const Tensor& parameter) -> std::optional<ShardPlacement> {
        if (parameter.dim() == 3) return placement;
        return std::nullopt;
      };
      return error_of([&] { fully_shard(module, options); });
    };
    EXPECT_THAT(error(Shard(1)),
                AllOf(HasSubstr("'v' of size [7, 3, 12]"),
                      HasSubstr("3 does not divide by the 2 ranks of DeviceMesh")));
    EXPECT_THAT(error(Shard(3)), HasSubstr("which has 3 dimensions"));
    EXPECT_THAT(error(Shard(-4)), HasSubstr("which has 3 dimensions"));
    EXPECT_THAT(error(Partial()), HasSubstr("must be a Shard or Replicate()"));
    EXPECT_THAT(error({Shard(0), init_device_mesh("cpu", {2, 1})}), HasSubstr("must name"));
    EXPECT_FALSE(is_fsdp(*module));
    EXPECT_FALSE(is_dtensor(module->parameters()[0]));
  });
}

TEST_P(WrapOptions, IgnoredParametersAreLeftAlone) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    FullyShardOptions options;
    options.ignored_params = {module->a->weight, module->b->bias};
    fully_shard(module->a, options);
    fully_shard(module, FullyShardOptions{.ignored_params = {module->b->bias}});
    const auto parameters = module->named_parameters();
    EXPECT_FALSE(is_dtensor(parameters["a.weight"]));
    EXPECT_FALSE(is_dtensor(parameters["b.bias"]));
    EXPECT_TRUE(is_dtensor(parameters["a.bias"]));
    EXPECT_TRUE(is_dtensor(parameters["b.weight"]));
    for (int step = 0; step < 2; ++step) {
      module->zero_grad();
      (module->a->weight.sum() * (rank + 1.0) + module->a->bias.sum() * (rank + 1.0) +
       module->b->bias.sum() + module->b->weight.sum())
          .backward();
      // Not reduced: this rank's own.
      EXPECT_LE(difference(parameters["a.weight"].grad(), torch::full({5, 5}, rank + 1.0)), 0);
      EXPECT_LE(difference(full(parameters["a.bias"].grad()),
                           torch::full({5}, (get_world_size() + 1) / 2.0)),
                0);
    }
  });
}

TEST_P(WrapOptions, ShardsOnTheHost) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    FullyShardOptions options;
    options.offload_policy = CPUOffloadPolicy{.pin_memory = false};
    wrap_layers(twins.sharded, options);
    EXPECT_TRUE(DTensor(twins.sharded->parameters()[0]).to_local().is_cpu());
    as_fsdp(*twins.sharded).set_requires_gradient_sync(false);
    twins.backward(loss);
    as_fsdp(*twins.sharded).set_requires_gradient_sync(true);
    twins.backward(loss);
    twins.expect_same(rounding_bound());
    expect_trains_alike(twins, loss, rounding_bound());
  });
}

}  // namespace
}  // namespace fsdp2::testing::wrap_options
