// fsdp2::optim::AdamW against torch's own AdamW, C++ and Python.

#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <sstream>

namespace fsdp2::testing::fused_adamw {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

AdamWOptions busy(bool amsgrad) {
  return AdamWOptions(0.1).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.2).amsgrad(amsgrad);
}

/// What torch.optim.AdamW(fused=True) of Python gives.
TEST(FusedAdamW, GivesThePythonNumbers) {
  for (bool other : {false, true}) {
    Tensor p = torch::tensor({1.0f, -2.0f, 3.0f, 0.5f}).requires_grad_();
    optim::AdamW optimizer({p}, busy(other), {.maximize = other});
    for (int step = 0; step < 4; ++step) {
      p.mutable_grad() = torch::tensor({0.5f, -1.0f, 2.0f, 0.0f}) * std::pow(-0.5, step);
      optimizer.step();
    }
    const Tensor expected =
        other ? torch::tensor({1.08308935, -2.00545788, 2.9278264, 0.461184144}, torch::kDouble)
              : torch::tensor({0.761344671, -1.68371284, 2.60608077, 0.461184144}, torch::kDouble);
    EXPECT_LE(difference(p, expected), 3e-7);
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *optimizer.state().at(p.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 4);
    EXPECT_LE(difference(state.exp_avg(),
                         torch::tensor({0.0267, -0.0534, 0.1068, 0.0}) * (other ? -1 : 1)),
              1e-7);
    EXPECT_LE(difference(state.exp_avg_sq(),
                         torch::tensor({0.0144749992, 0.0578999966, 0.231599987, 0.0})),
              1e-7);
  }
}

struct Kind {
  std::vector<int64_t> sizes;
  torch::ScalarType dtype;
  double bound;
};

/// Plain and sharded parameters of all dtypes in one optimizer.
void expect_same_steps(const DeviceMesh& mesh, bool amsgrad) {
  torch::manual_seed(7);
  const std::vector<Kind> kinds = {{{7, 3}, torch::kFloat, 2e-6},
                                   {{5}, torch::kFloat, 2e-6},
                                   {{1, 4}, torch::kDouble, 1e-12},
                                   {{}, torch::kFloat, 2e-6},
                                   {{9, 2}, torch::kBFloat16, 0.1}};
  std::vector<Tensor> plain, ours;
  std::vector<double> bounds;
  for (const auto& [sizes, dtype, bound] : kinds) {
    for (bool sharded : {true, false}) {
      const Tensor value = torch::randn(sizes, dtype);
      const Placement placement = sizes.empty() ? Replicate() : Shard(0);
      plain.push_back(value.clone().requires_grad_());
      ours.push_back(sharded ? distribute_tensor(value, mesh, {placement}).requires_grad_()
                             : value.clone().requires_grad_());
      bounds.push_back(bound);
    }
  }
  const auto groups = [](const std::vector<Tensor>& all) {
    const auto half = all.begin() + 4;
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(all.begin(), half),
                        std::make_unique<AdamWOptions>(AdamWOptions(0.03).weight_decay(0)));
    groups.emplace_back(std::vector<Tensor>(half, all.end()));
    return groups;
  };
  torch::optim::AdamW reference(groups(plain), busy(amsgrad));
  optim::AdamW fused(groups(ours), busy(amsgrad));
  for (int step = 0; step < 10; ++step) {
    for (size_t i = 0; i < plain.size(); ++i) {
      const bool skipped = i % 3 == static_cast<size_t>(step) % 3;  // no gradient this time
      const Tensor gradient = torch::randn(plain[i].sizes(), plain[i].scalar_type());
      plain[i].mutable_grad() = skipped ? Tensor() : gradient;
      if (skipped) {
        ours[i].mutable_grad() = Tensor();
      } else if (is_dtensor(ours[i])) {
        ours[i].mutable_grad() = chunk_tensor(gradient, mesh, DTensor(ours[i]).placements());
      } else if (gradient.dim() == 2 && step % 2 == 0) {
        ours[i].mutable_grad() = gradient.t().contiguous().t();
      } else {
        ours[i].mutable_grad() = gradient;
      }
    }
    reference.step();
    fused.step();
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_LE(difference(full(ours[i]), plain[i]), bounds[i]) << "parameter " << i;
  }
}

TEST(FusedAdamW, StepsMixedParametersAsTorch) {
  for (int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      for (bool amsgrad : {false, true}) expect_same_steps(mesh, amsgrad);
    });
  }
}

TEST(FusedAdamW, ComplexParametersStepAsPairsOfRealOnes) {
  torch::manual_seed(1);
  Tensor complex = torch::randn({4}, torch::kComplexFloat).requires_grad_();
  Tensor pairs = torch::view_as_real(complex.detach()).clone().requires_grad_();
  optim::AdamW ours({complex}, busy(true));
  torch::optim::AdamW reference({pairs}, busy(true));
  for (int step = 0; step < 3; ++step) {
    complex.mutable_grad() = torch::randn({4}, torch::kComplexFloat);
    pairs.mutable_grad() = torch::view_as_real(complex.grad()).clone();
    ours.step();
    reference.step();
  }
  EXPECT_LE(difference(torch::view_as_real(complex.detach()), pairs), 2e-6);
}

TEST(FusedAdamW, ParametersWithGapsInMemory) {
  torch::manual_seed(1);
  const Tensor value = torch::randn({4, 6});
  Tensor plain = value.slice(1, 0, 6, 2).clone().requires_grad_();
  const Tensor whole = value.clone();
  Tensor gaps = whole.slice(1, 0, 6, 2).detach().requires_grad_();
  torch::optim::AdamW reference({plain}, busy(true));
  optim::AdamW fused({gaps}, busy(true));
  for (int step = 0; step < 3; ++step) {
    plain.mutable_grad() = torch::randn({4, 3});
    gaps.mutable_grad() = plain.grad().clone();
    reference.step();
    fused.step();
  }
  EXPECT_LE(difference(gaps, plain), 2e-6);
  EXPECT_TRUE(torch::equal(whole.select(1, 1), value.select(1, 1))) << "wrote between";
}

TEST(FusedAdamW, TrainsShardedModulesAsThePlainOne) {
  for (int world : {1, 2, 3, 4}) {
    on_ranks(world, [](int) {
      for (bool reshard : {true, false}) {
        Twins<TwoLinear> twins;
        FullyShardOptions options;
        options.reshard_after_forward = reshard;
        wrap_layers(twins.sharded, options);
        torch::optim::AdamW plain(twins.plain->parameters(), busy(false));
        optim::AdamW ours(twins.sharded->parameters(), busy(false));
        for (int step = 0; step < 4; ++step) {
          twins.zero_grad();
          as_fsdp(*twins.sharded->a).unshard();  // bytes that the step must make stale
          twins.backward([](TwoLinear& module, int rank) {
            torch::manual_seed(100 + rank);
            return module->forward(torch::randn({3, 5})).pow(2).sum();
          });
          twins.expect_same(1e-4);
          as_fsdp(*twins.sharded->b).unshard();
          plain.step();
          ours.step();
        }
      }
    });
  }
}

TEST(FusedAdamW, BackwardOfAForwardBeforeTheStepIsAnError) {
  on_ranks(2, [](int) {
    TwoLinear module;
    fully_shard(module);
    optim::AdamW optimizer(module->parameters(), busy(false));
    const auto loss = [&] { return module->forward(torch::ones({2, 5})).pow(2).sum(); };
    loss().backward();
    const Tensor early = loss();
    optimizer.step();
    EXPECT_THAT(error_of([&] { early.backward(); }), HasSubstr("modified by an inplace operation"));
  });
}

TEST(FusedAdamW, ArchivesAreThoseOfTorch) {
  torch::manual_seed(2);
  const Tensor value = torch::randn({5});
  std::vector<Tensor> parameters;
  for (int i = 0; i < 3; ++i) parameters.push_back(value.clone().requires_grad_());
  optim::AdamW first({parameters[0]}, busy(true)), second({parameters[1]}, busy(true));
  torch::optim::AdamW third({parameters[2]}, busy(true));
  const auto step = [](torch::optim::Optimizer& optimizer, Tensor& parameter, double gradient) {
    parameter.mutable_grad() = torch::full({5}, gradient);
    optimizer.step();
  };
  step(first, parameters[0], 1);
  std::stringstream archive;
  torch::save(first, archive);
  const std::string bytes = archive.str();
  for (torch::optim::Optimizer* optimizer :
       std::vector<torch::optim::Optimizer*>{&second, &third}) {
    std::stringstream in(bytes);
    torch::load(*optimizer, in);
  }
  torch::NoGradGuard no_grad;
  for (int i : {1, 2}) parameters[i].copy_(parameters[0]);
  step(first, parameters[0], -2);
  step(second, parameters[1], -2);
  step(third, parameters[2], -2);
  EXPECT_EQ(difference(parameters[1], parameters[0]), 0);
  EXPECT_LE(difference(parameters[2], parameters[0]), 1e-6);
}

TEST(FusedAdamW, ClosureRunsWithGradientsEnabled) {
  Tensor p = torch::ones({2}).requires_grad_();
  optim::AdamW optimizer({p}, AdamWOptions(0.1).weight_decay(0));
  const torch::NoGradGuard no_grad;
  const Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    Tensor sum = (p * p).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 2);
  EXPECT_LE(difference(p, torch::full({2}, 0.9)), 1e-6);
}

TEST(FusedAdamW, WrongGradientsAreNamedBeforeAnythingChanges) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    Tensor good = torch::ones({4}).requires_grad_();
    Tensor bad = chunk_tensor(torch::ones({4}), mesh, {Shard(0)}).requires_grad_();
    good.mutable_grad() = torch::ones({4});
    bad.mutable_grad() = chunk_tensor(torch::ones({4}), mesh, {Replicate()});
    optim::AdamW optimizer({good, bad}, busy(false));
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                HasSubstr("parameter 1 in group 0 is laid out over the mesh in another way"));
    EXPECT_TRUE(torch::equal(good, torch::ones({4})));
    EXPECT_THAT(error_of([&] { optim::AdamW({good}, AdamWOptions(-1)); }),
                HasSubstr("Invalid learning rate"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::fused_adamw
