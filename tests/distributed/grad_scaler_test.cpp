// The gradient scaler: all ranks take or skip a step together.

#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::grad_scaler {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

class Scaler : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Scaler, ::testing::Values(1, 2, 3, 4));

TEST_P(Scaler, InfiniteOnOneRankSkipsTheStepOnAll) {
  const int world = GetParam();
  on_ranks(world, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {world});
    Tensor sharded = chunk_tensor(torch::ones({7, 2}), mesh, {Shard(0)}).requires_grad_();
    Tensor plain = torch::ones({3}).requires_grad_();
    for (const auto& parameters : {std::vector{sharded, plain}, {plain}, {sharded}}) {
      for (double bad : {kInfinite, std::nan("")}) {
        torch::optim::SGD optimizer(parameters, 0.5);
        GradScalerOptions options;
        options.init_scale = 8;
        GradScaler scaler(options);
        const auto backward = [&](double value) {
          for (const auto& parameter : parameters) {
            Tensor gradient = is_dtensor(parameter) ? DTensor(parameter).to_local() : parameter;
            gradient = torch::full_like(gradient, 8.0);
            if (rank == world - 1 && gradient.numel() > 0) gradient.view(-1)[0] = value;
            Tensor& slot = parameter.mutable_grad();
            slot = is_dtensor(parameter)
                       ? DTensor::from_local(gradient, mesh, {Shard(0)}, parameter.sizes().vec())
                       : gradient;
          }
        };
        const auto before = full(parameters[0]).clone();
        backward(bad);
        EXPECT_FALSE(scaler.step(optimizer));
        EXPECT_EQ(difference(full(parameters[0]), before), 0);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 4);
        backward(8);
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
      }
    }
  });
}

TEST_P(Scaler, StepsAsWithoutScaling) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    torch::optim::AdamW plain(twins.plain->parameters(), 0.01);
    optim::AdamW ours(twins.sharded->parameters(), 0.01);
    GradScaler scaler;
    for (int step = 0; step < 4; ++step) {
      twins.zero_grad();
      twins.backward([&](TwoLinear& module, int rank) {
        torch::manual_seed(100 + rank);
        const Tensor loss = module->forward(torch::randn({3, 5})).pow(2).sum();
        return &module == &twins.sharded ? scaler.scale(loss) : loss;
      });
      scaler.unscale_(ours);
      twins.expect_same(2e-5);
      EXPECT_NEAR(clip_grad_norm_(twins.sharded->parameters(), 0.5) /
                      torch::nn::utils::clip_grad_norm_(twins.plain->parameters(), 0.5),
                  1, 1e-6);
      plain.step();
      EXPECT_TRUE(scaler.step(ours));
      scaler.update();
      twins.expect_same(2e-4, /*gradients=*/false);
    }
  });
}

TEST_P(Scaler, TrainsInFloat16) {
  on_ranks(GetParam(), [](int) {
    torch::manual_seed(1);
    Net net;
    FullyShardOptions options;
    options.mp_policy.param_dtype = torch::kHalf;
    fully_shard(net, options);
    optim::AdamW optimizer(net->parameters(), 0.02);
    GradScalerOptions scaling;
    scaling.init_scale = 1e30;  // far too much at first: float16 ends at 65504
    scaling.backoff_factor = 1e-3;
    scaling.growth_interval = 1000;
    GradScaler scaler(scaling);
    int skipped = 0;
    double first = 0, last = 0;
    for (int step = 0; step < 40; ++step) {
      torch::manual_seed(get_rank());
      const Tensor ids = torch::randint(11, {2, 5});
      optimizer.zero_grad();
      const Tensor loss = net->loss(ids, ids);
      scaler.scale(loss).backward();
      skipped += scaler.step(optimizer) ? 0 : 1;
      scaler.update();
      last = mean_over_ranks(loss);
      if (step == 0) first = last;
    }
    EXPECT_GT(skipped, 5);
    EXPECT_LT(skipped, 15);
    EXPECT_LT(last, first / 2);
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(torch::isfinite(full(parameter)).all().item<bool>());
    }
  });
}

/// Hides AdamW's class from the scaler, which then divides gradients before the step.
struct OtherAdamW : optim::AdamW {
  using optim::AdamW::AdamW;
};

/// A module and its optimizer, to be stepped by scaled gradients.
template <class Optimizer>
struct Trained {
  TwoLinear module = [] {
    torch::manual_seed(1);
    return TwoLinear();
  }();
  GradScaler scaler;
  std::unique_ptr<Optimizer> optimizer;

  Trained(const FullyShardOptions& options, bool amsgrad, double scale)
      : scaler(GradScalerOptions{.init_scale = scale}) {
    wrap_layers(module, options);
    optimizer = std::make_unique<Optimizer>(module->parameters(),
                                            torch::optim::AdamWOptions(0.05).amsgrad(amsgrad));
  }
  Tensor loss(int step) {
    torch::manual_seed(10 * step + get_rank());
    return module->forward(torch::randn({3, 5})).pow(2).sum();
  }
  bool step() {
    const bool stepped = scaler.step(*optimizer);
    scaler.update();
    return stepped;
  }
};

TEST_P(Scaler, FusedStepsDivideAsUnscaleDoes) {
  on_ranks(GetParam(), [](int rank) {
    for (const bool amsgrad : {false, true}) {
      for (const double scale : {65536.0, 3000.0}) {
        FullyShardOptions options;
        if (amsgrad)
          options.shard_placement_fn = [](const Tensor& parameter) {
            const bool splits = parameter.dim() == 2 && get_world_size() == 1;
            return splits ? std::optional<ShardPlacement>(Shard(1)) : std::nullopt;
          };
        Trained<optim::AdamW> fused(options, amsgrad, scale);
        Trained<OtherAdamW> other(options, amsgrad, scale);
        const double bound = scale == 65536 ? 0 : 2e-6;
        for (int step = 0; step < 5; ++step) {
          const bool bad = step == 2;
          const auto run = [&](auto& trained) {
            trained.optimizer->zero_grad();
            trained.scaler.scale(trained.loss(step)).backward();
            if (bad && rank == 0) {
              DTensor(trained.module->a->parameters()[1].grad()).to_local().view(-1)[0] = kInfinite;
            }
            if (step == 3) {
              trained.scaler.unscale_(*trained.optimizer);
              clip_grad_norm_(trained.module->parameters(), 0.1);
            }
            return trained.step();
          };
          const bool stepped = run(fused);
          EXPECT_EQ(stepped, run(other));
          EXPECT_EQ(stepped, !bad);
          for (size_t i = 0; i < fused.module->parameters().size(); ++i) {
            const Tensor mine = fused.module->parameters()[i];
            const Tensor its = other.module->parameters()[i];
            EXPECT_LE(difference(full(mine), full(its)), bound) << step;
            if (stepped) {
              EXPECT_LE(difference(full(mine.grad()), full(its.grad())), bound) << step;
            }
            const auto count = [](torch::optim::Optimizer& optimizer, const Tensor& parameter) {
              auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
              return static_cast<torch::optim::AdamWParamState&>(state).step();
            };
            EXPECT_EQ(count(*fused.optimizer, mine), count(*other.optimizer, its));
          }
        }
      }
    }
  });
}

TEST_P(Scaler, FusedStepsOfHalfGradientsKeepWhatHalfCannotHold) {
  on_ranks(GetParam(), [](int) {
    // 2^-26 is below the least number of float16, and 2^-10 with the scale is not.
    Tensor weight = torch::ones({4}, torch::kHalf).requires_grad_();
    GradScaler scaler(GradScalerOptions{.init_scale = 65536});
    optim::AdamW optimizer({weight}, torch::optim::AdamWOptions(0.25).eps(1e-12).weight_decay(0));
    weight.mutable_grad() = torch::full({4}, 1.0 / 1024, torch::kHalf);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_EQ(weight[0].item<float>(), 0.75);
    EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("called twice"));
    EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }), HasSubstr("not scaled any more"));
  });
}

TEST(ScalerState, GrowsBacksOffAndIsRestored) {
  GradScalerOptions options;
  options.init_scale = 16;
  options.growth_interval = 3;
  GradScaler scaler(options);
  Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1.0);
  const auto step = [&](GradScaler& by, double gradient) {
    weight.mutable_grad() = torch::full({2}, gradient);
    const bool stepped = by.step(optimizer);
    by.update();
    return stepped;
  };
  EXPECT_TRUE(step(scaler, 16));
  EXPECT_EQ(weight[0].item<float>(), 0) << "1 - 16 / 16";
  EXPECT_TRUE(step(scaler, 1));
  GradScaler other(options);
  other.load_state(scaler.state());
  for (auto* each : {&scaler, &other}) {
    EXPECT_TRUE(step(*each, 1));
    EXPECT_EQ(each->get_scale(), 32);
    EXPECT_TRUE(step(*each, 1));
    EXPECT_FALSE(step(*each, kInfinite));
    EXPECT_EQ(each->get_scale(), 16);
    EXPECT_TRUE(step(*each, 1));
    EXPECT_TRUE(step(*each, 1));
    EXPECT_EQ(each->get_scale(), 16) << "a skipped step begins a new count";
    EXPECT_TRUE(step(*each, 1));
    EXPECT_EQ(each->get_scale(), 32);
  }
  scaler.update(100);
  EXPECT_EQ(scaler.get_scale(), 100);
}

TEST(ScalerState, ScaledLossesAreAtLeastFloat32) {
  GradScaler scaler;
  const Tensor loss = scaler.scale(torch::tensor(3.0, torch::kHalf));
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_EQ(loss.item<float>(), 3 * 65536.0f);
  EXPECT_EQ(scaler.scale(torch::tensor(3.0, torch::kDouble)).scalar_type(), torch::kDouble);
  GradScalerOptions off;
  off.enabled = false;
  EXPECT_EQ(GradScaler(off).scale(torch::tensor(3.0f)).item<float>(), 3);
}

TEST(ScalerState, WrongOrdersAreErrors) {
  Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1.0);
  GradScaler scaler;
  EXPECT_THAT(error_of([&] { scaler.update(); }), HasSubstr("needs an unscale_() or step()"));
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("call backward() first"));
  weight.mutable_grad() = torch::ones({2});
  scaler.unscale_(optimizer);
  EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }), HasSubstr("not scaled any more"));
  scaler.step(optimizer);
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("called twice"));
  GradScalerOptions bad;
  bad.backoff_factor = 2;
  EXPECT_THAT(error_of([&] { GradScaler{bad}; }), HasSubstr("backoff_factor"));
}

}  // namespace
}  // namespace fsdp2::testing::grad_scaler
