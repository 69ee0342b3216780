// pytorch#170667: ranks take different branches. The gradient is the right mean, or every rank gets
// an error in time; never a sum of different parameters, and never a gradient on some ranks only.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/shared_outcomes.h"
#include "support/twins.h"

namespace fsdp2::testing::parameters_used_on_one_rank {
namespace {

using torch::Tensor;

struct HolderImpl : torch::nn::Module {
  Tensor weight;
  explicit HolderImpl(int64_t size) { weight = register_parameter("weight", torch::ones({size})); }
};
TORCH_MODULE(Holder);

struct BranchesImpl : torch::nn::Module {
  Holder a{nullptr}, b{nullptr};
  BranchesImpl(int64_t na, int64_t nb) {
    a = register_module("a", Holder(na));
    b = register_module("b", Holder(nb));
  }
};
TORCH_MODULE(Branches);

using Outcome = double;
constexpr Outcome kMean = 0, kError = 1, kWrong = 2;

/// All ranks right, or all with an error.
void expect_right_or_refused(int world, const std::function<Outcome(int)>& run, bool right_only) {
  SharedOutcomes outcomes(world);
  on_ranks(
      world,
      [&](int rank) {
        outcomes.set(rank, run(rank));
        if (outcomes.get(rank) == kError) outcomes.leave();
      },
      std::chrono::seconds(12));
  EXPECT_TRUE(outcomes.count(kMean) == world || (!right_only && outcomes.count(kError) == world))
      << outcomes.count(kMean) << " right, " << outcomes.count(kError) << " refused, "
      << outcomes.count(kWrong) << " wrong of " << world;
}

Outcome branch(int rank, int64_t na, int64_t nb, bool apart) {
  Branches module(na, nb);
  const std::string error = error_of([&] {
    if (apart) {
      fully_shard(module->a);
      fully_shard(module->b);
    }
    fully_shard(module);
    (rank == 0 ? module->a->weight.sum() : 2 * module->b->weight.sum()).backward();
  });
  if (!error.empty()) return kError;
  const auto parameters = module->named_parameters();
  const Tensor ga = parameters["a.weight"].grad(), gb = parameters["b.weight"].grad();
  if (!ga.defined() || !gb.defined()) return kWrong;
  const bool right = difference(full(ga), torch::full({na}, 0.5)) == 0 &&
                     difference(full(gb), torch::full({nb}, 1.0)) == 0;
  return right ? kMean : kWrong;
}

TEST(ParametersUsedOnOneRank, OneGroupOfEqualSizes) {
  expect_right_or_refused(2, [](int rank) { return branch(rank, 4, 4, false); }, true);
}

TEST(ParametersUsedOnOneRank, OneGroupOfDifferentSizes) {
  expect_right_or_refused(2, [](int rank) { return branch(rank, 4, 6, false); }, true);
}

TEST(ParametersUsedOnOneRank, TwoGroupsOfEqualSizes) {
  expect_right_or_refused(2, [](int rank) { return branch(rank, 4, 4, true); }, false);
}

TEST(ParametersUsedOnOneRank, TwoGroupsOfDifferentSizes) {
  expect_right_or_refused(2, [](int rank) { return branch(rank, 4, 6, true); }, false);
}

TEST(ParametersUsedOnOneRank, UnusedEverywhereStaysUndefinedAndIsNotDecayed) {
  on_ranks(2, [](int) {
    for (bool apart : {false, true}) {
      Branches module(4, 6);
      if (apart) {
        fully_shard(module->a);
        fully_shard(module->b);
      }
      fully_shard(module);
      torch::optim::AdamW optimizer(module->parameters(),
                                    torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        module->a->weight.sum().backward();
        optimizer.step();
      }
      const auto parameters = module->named_parameters();
      EXPECT_FALSE(parameters["b.weight"].grad().defined());
      EXPECT_EQ(difference(full(parameters["b.weight"]), torch::ones({6})), 0);
    }
  });
}

/// Two blocks of the same sizes, a group each. `branch` runs the second one.
using Second = std::function<Tensor(TwoLinear& second, const Tensor& x, int rank)>;

struct PairImpl : torch::nn::Module {
  TwoLinear first{nullptr}, second{nullptr};
  PairImpl() {
    first = register_module("first", TwoLinear());
    second = register_module("second", TwoLinear());
  }
};
TORCH_MODULE(Pair);

Outcome run_pair(const Second& second, bool reshard_after_forward, double bound = 1e-5) {
  Twins<Pair> twins;
  FullyShardOptions options;
  options.reshard_after_forward = reshard_after_forward;
  auto loss = [&](Pair& m, int r) {
    torch::manual_seed(100 + r);
    Tensor h = m->first->forward(torch::randn({3, 5}));
    return second(m->second, h, r).pow(2).sum();
  };
  const std::string error = error_of([&] {
    fully_shard(twins.sharded->first, options);
    fully_shard(twins.sharded->second, options);
    fully_shard(twins.sharded, options);
    for (int step = 0; step < 3; ++step) twins.backward(loss);
  });
  if (!error.empty()) return kError;
  const auto ours = twins.sharded->named_parameters();
  for (const auto& item : twins.plain->named_parameters()) {
    const Tensor& mine = ours[item.key()].grad();
    if (mine.defined() != item.value().grad().defined()) return kWrong;
    if (mine.defined() && difference(full(mine), item.value().grad()) > bound) return kWrong;
  }
  return kMean;
}

class Branch : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(ReshardAfterForward, Branch, ::testing::Bool());

TEST_P(Branch, LayerUsedOnOneRankInsideAGroup) {
  expect_right_or_refused(
      2,
      [](int) {
        return run_pair(
            [](TwoLinear& m, const Tensor& x, int rank) {
              Tensor h = torch::tanh(m->a(x));
              return rank == 0 ? h + m->b(h) : h;
            },
            GetParam());
      },
      true);
}

TEST_P(Branch, LayerWithoutGradientOnOneRank) {
  expect_right_or_refused(
      3,
      [](int) {
        return run_pair(
            [](TwoLinear& m, const Tensor& x, int rank) {
              Tensor h = torch::tanh(m->a(x));
              return h + (rank == 0 ? m->b(h).detach() : m->b(h));
            },
            GetParam());
      },
      true);
}

TEST_P(Branch, WholeGroupWithoutGradientOnOneRank) {
  expect_right_or_refused(
      2,
      [](int) {
        return run_pair(
            [](TwoLinear& m, const Tensor& x, int rank) {
              Tensor y = m->forward(x);
              return x + (rank == 0 ? y.detach() : y);
            },
            GetParam());
      },
      false);
}

TEST_P(Branch, WholeGroupSkippedOnOneRank) {
  expect_right_or_refused(
      2,
      [](int) {
        return run_pair([](TwoLinear& m, const Tensor& x,
                           int rank) { return rank == 0 ? x + m->forward(x) : x; },
                        GetParam());
      },
      false);
}

TEST_P(Branch, NoGradOnOneRank) {
  expect_right_or_refused(
      2,
      [](int) {
        return run_pair(
            [](TwoLinear& m, const Tensor& x, int rank) {
              torch::AutoGradMode mode(rank == 0);
              Tensor y = m->forward(x);
              torch::AutoGradMode on(true);
              return x + y;
            },
            GetParam());
      },
      false);
}

TEST_P(Branch, FirstUseInSwappedOrder) {
  expect_right_or_refused(
      2,
      [](int rank) {
        torch::manual_seed(1);
        Branches module(4, 4);
        FullyShardOptions options;
        options.reshard_after_forward = GetParam();
        const std::string error = error_of([&] {
          fully_shard(module->a, options);
          fully_shard(module->b, options);
          fully_shard(module, options);
          Tensor a, b;
          if (rank == 0) {
            a = module->a->weight.sum();
            b = 3 * module->b->weight.sum();
          } else {
            b = 3 * module->b->weight.sum();
            a = module->a->weight.sum();
          }
          (a + b).backward();
        });
        if (!error.empty()) return kError;
        const auto p = module->named_parameters();
        return difference(full(p["a.weight"].grad()), torch::full({4}, 1.0)) == 0 &&
                       difference(full(p["b.weight"].grad()), torch::full({4}, 3.0)) == 0
                   ? kMean
                   : kWrong;
      },
      false);
}

TEST(BranchOnOneRank, TouchOfOneRankAlone) {
  expect_right_or_refused(
      2,
      [](int rank) {
        Branches module(4, 4);
        const std::string error = error_of([&] {
          fully_shard(module->a);
          fully_shard(module->b);
          fully_shard(module);
          if (rank == 0) (module->b->weight * 2).sum().item<double>();  // a log line
          (module->a->weight.sum() + module->b->weight.sum()).backward();
        });
        if (!error.empty()) return kError;
        return difference(full(module->named_parameters()["a.weight"].grad()), torch::ones({4})) ==
                       0
                   ? kMean
                   : kWrong;
      },
      false);
}

TEST(BranchOnOneRank, WriteOfOneRankAlone) {
  expect_right_or_refused(
      2,
      [](int rank) {
        Branches module(4, 4);
        double sum = 0;
        const std::string error = error_of([&] {
          fully_shard(module);
          torch::NoGradGuard no_grad;
          sum = module->a->weight.sum().item<double>();
          if (rank == 0) DTensor(module->named_parameters()["a.weight"]).to_local().mul_(2);
          sum = module->a->weight.sum().item<double>();
          // If that did not gather, the next use of both ranks must notice.
          module->a->weight.sum();
          wait(barrier(world_group()));
        });
        if (!error.empty()) return kError;
        return sum == 6 ? kMean : kWrong;
      },
      false);
}

}  // namespace
}  // namespace fsdp2::testing::parameters_used_on_one_rank
