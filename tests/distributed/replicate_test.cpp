// Replicated modules train as the plain one on the mean over ranks.

#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::replicate_modules {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

Tensor input(int rank, int64_t size = 5) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, size});
}

Tensor net_loss(Net& net, int rank, int step) {
  torch::manual_seed(1000 * step + rank);
  const Tensor ids = torch::randint(11, {2, 5});
  return net->loss(ids, torch::randint(11, {2, 5}));
}

class Replicate : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Replicate, ::testing::Values(1, 2, 3, 4));

void train(const ReplicateOptions& options) {
  Twins<Net> twins;
  replicate(twins.sharded, options);
  torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
      ours(twins.sharded->parameters(), 0.01);
  for (int step = 0; step < 5; ++step) {
    plain.zero_grad();
    ours.zero_grad(/*set_to_none=*/step % 2 == 0);
    twins.backward([&](Net& net, int rank) { return net_loss(net, rank, step); });
    twins.expect_same(5e-6);
    plain.step();
    ours.step();
  }
  twins.expect_same(1e-4, /*gradients=*/false);
}

TEST_P(Replicate, TrainsAsThePlainModule) {
  on_ranks(GetParam(), [](int) {
    for (double cap : {25.0, 1e-4}) {  // one bucket, and many
      for (bool view : {false, true}) {
        for (bool find : {false, true}) {
          ReplicateOptions options;
          options.bucket_cap_mb = cap;
          options.gradient_as_bucket_view = view;
          options.find_unused_parameters = find;
          train(options);
        }
      }
    }
  });
}

TEST_P(Replicate, OneRankIsBitIdentical) {
  if (GetParam() != 1) GTEST_SKIP();
  on_ranks(1, [](int) {
    Twins<Net> twins;
    replicate(twins.sharded);
    for (int step = 0; step < 3; ++step) {
      twins.backward([&](Net& net, int rank) { return net_loss(net, rank, step); });
      twins.expect_same(0);
    }
  });
}

TEST_P(Replicate, ValuesOfRankZeroCountAtFirst) {
  on_ranks(GetParam(), [](int rank) {
    auto module = torch::nn::BatchNorm1d(3);
    torch::NoGradGuard no_grad;
    module->weight.fill_(rank + 7);
    module->running_mean.fill_(rank + 3);
    module->num_batches_tracked.fill_(rank + 2);
    replicate(module);
    EXPECT_TRUE(torch::equal(module->weight, torch::full({3}, 7.0)));
    EXPECT_TRUE(torch::equal(module->running_mean, torch::full({3}, 3.0)));
    EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 2);
  });
}

TEST_P(Replicate, AverageIsNotASum) {
  on_ranks(GetParam(), [](int rank) {
    const int world = get_world_size();
    for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
      auto linear = torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false));
      linear->to(dtype);
      replicate(linear);
      linear->forward(torch::full({3, 4}, rank + 1.0, dtype)).sum().backward();
      const double mean = 3 * (world + 1) / 2.0;  // 4.5 on two ranks, 7.5 on four
      if (world != 3) {
        EXPECT_EQ(difference(linear->weight.grad(), torch::full({3, 4}, mean)), 0) << dtype;
      } else {
        EXPECT_LE(difference(linear->weight.grad(), torch::full({3, 4}, mean)), 0.05) << dtype;
      }
    }
  });
}

TEST_P(Replicate, AccumulatesWithAndWithoutSync) {
  on_ranks(GetParam(), [](int) {
    for (bool view : {false, true}) {
      for (int synced_from : {0, 2}) {
        Twins<TwoLinear> twins;
        ReplicateOptions options;
        options.gradient_as_bucket_view = view;
        auto replica = replicate(twins.sharded, options);
        for (int round = 0; round < 2; ++round) {
          twins.zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            const auto loss = [&](TwoLinear& module, int rank) {
              return module->forward(input(rank + 10 * micro)).pow(2).sum();
            };
            if (micro < synced_from) {
              auto guard = replica.no_sync();
              twins.backward(loss);
            } else {
              twins.backward(loss);
            }
          }
          twins.expect_same(2e-5);
          EXPECT_TRUE(replica.requires_gradient_sync());
        }
      }
    }
  });
}

TEST_P(Replicate, GradientsStayLocalWithoutSync) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear plain, module;
    copy_values(*plain, *module);
    auto replica = replicate(module);
    copy_values(*plain, *module);
    replica.set_requires_gradient_sync(false);
    for (auto* each : {&plain, &module}) (*each)->forward(input(rank)).sum().backward();
    expect_same_module(*module, *plain, 0);
  });
}

TEST_P(Replicate, PartsOfTheModuleAverageToo) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    ReplicateOptions options;
    options.find_unused_parameters = true;
    replicate(twins.sharded, options);
    for (int step = 0; step < 2; ++step) {
      twins.backward(
          [](TwoLinear& module, int rank) { return module->a(input(rank)).pow(2).sum(); });
      twins.expect_same(1e-5);
    }
  });
}

TEST_P(Replicate, FrozenTiedAndIgnoredParameters) {
  on_ranks(GetParam(), [](int rank) {
    Twins<Net> twins;
    for (auto* net : twins.both()) {
      (*net)->embedding->weight.set_requires_grad(false);
      auto& blocks = *(*net)->blocks;
      auto& first = blocks[0]->as<BlockImpl>()->a;
      auto* second = blocks[1]->as<BlockImpl>();
      second->replace_module("a", first);
      second->a = first;
    }
    ReplicateOptions options;
    options.ignored_parameters = {"head.bias"};
    replicate(twins.sharded, options);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([&](Net& net, int r) { return net_loss(net, r, step); });
      const Tensor own = twins.sharded->head->bias.grad().clone();
      Net alone;
      copy_values(*alone, *twins.plain);
      (*alone->blocks)[1]->as<BlockImpl>()->a = (*alone->blocks)[0]->as<BlockImpl>()->a;
      net_loss(alone, rank, step).backward();
      EXPECT_LE(difference(own, alone->head->bias.grad()), 1e-6) << "the ignored one";
      twins.sharded->head->bias.mutable_grad() = twins.plain->head->bias.grad().clone();
      twins.expect_same(1e-5);
    }
  });
}

TEST_P(Replicate, SeveralModulesInOneBackwardAndInTurns) {
  on_ranks(GetParam(), [](int) {
    torch::manual_seed(1);
    Twins<TwoLinear> first, second;
    ReplicateOptions options;
    options.bucket_cap_mb = 1e-5;
    replicate(first.sharded, options);
    replicate(second.sharded);
    const auto joined = [&](TwoLinear& a, TwoLinear& b, int rank) {
      return b->forward(a->forward(input(rank))).pow(2).sum();
    };
    for (int step = 0; step < 2; ++step) {
      first.zero_grad();
      second.zero_grad();
      first.backward([&](TwoLinear& module, int rank) {
        return joined(module, &module == &first.plain ? second.plain : second.sharded, rank);
      });
      first.expect_same(2e-5);
      second.expect_same(2e-5);
      second.zero_grad();
      second.backward(
          [&](TwoLinear& module, int rank) { return module->forward(input(rank)).sum(); });
      second.expect_same(2e-5);
    }
  });
}

TEST_P(Replicate, BackwardTwiceThroughOneGraph) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    replicate(twins.sharded);
    Tensor sum;
    for (int rank = 0; rank < get_world_size(); ++rank) {
      const Tensor part = twins.plain->forward(input(rank)).pow(2).sum();
      sum = sum.defined() ? sum + part : part;
    }
    const Tensor plain = sum / get_world_size();
    const Tensor ours = twins.sharded->forward(input(get_rank())).pow(2).sum();
    for (const Tensor& loss : {plain, ours}) {
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    }
    twins.expect_same(2e-5);
  });
}

TEST_P(Replicate, FunctionalGradientsAreLocalAndGradientPenaltiesRight) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    replicate(twins.sharded);
    const Tensor loss = twins.sharded->forward(input(rank)).sum();
    const Tensor grad = torch::autograd::grad({loss}, {twins.sharded->a->weight})[0];
    EXPECT_FALSE(twins.sharded->a->weight.grad().defined());
    const Tensor own = twins.plain->forward(input(rank)).sum();
    EXPECT_EQ(difference(grad, torch::autograd::grad({own}, {twins.plain->a->weight})[0]), 0);
    for (int step = 0; step < 2; ++step) {
      twins.zero_grad();
      twins.backward([](TwoLinear& module, int r) {
        const Tensor x = input(r).requires_grad_();
        const Tensor y = module->forward(x).sum();
        const Tensor slope = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
        return y + slope.pow(2).sum();
      });
      twins.expect_same(2e-5);
    }
    twins.zero_grad();
    const auto refused = [&] {
      twins.sharded->forward(input(rank)).sum().backward({}, c10::nullopt, /*create_graph=*/true);
    };
    EXPECT_THAT(error_of(refused), HasSubstr("create_graph reached '"));
    twins.zero_grad();
    twins.backward([](TwoLinear& m, int r) { return m->forward(input(r)).pow(2).sum(); });
    twins.expect_same(2e-5);
  });
}

TEST_P(Replicate, BuffersFollowRankZero) {
  on_ranks(GetParam(), [](int) {
    for (bool asked : {true, false}) {
      torch::nn::Sequential module(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
      ReplicateOptions options;
      options.broadcast_buffers = asked;
      auto replica = replicate(module.ptr(), options);
      torch::nn::Sequential first(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
      copy_values(*first, *module);
      module->forward(input(get_rank())).pow(2).sum().backward();
      first->forward(input(0));
      const auto& mine = module[1]->as<torch::nn::BatchNorm1d>()->running_mean;
      const auto& expected = first[1]->as<torch::nn::BatchNorm1d>()->running_mean;
      EXPECT_EQ(difference(mine, expected) == 0, asked || get_rank() == 0);
      replica.sync_buffers();
      EXPECT_EQ(difference(mine, expected), 0);
    }
  });
}

TEST_P(Replicate, ALayerUsedOnOneRankGetsTheMeanWithZeros) {
  on_ranks(GetParam(), [](int rank) {
    const int world = get_world_size();
    for (bool view : {false, true}) {
      TwoLinear module;
      ReplicateOptions options;
      options.find_unused_parameters = true;
      options.gradient_as_bucket_view = view;
      replicate(module, options);
      for (int step = 0; step < 2; ++step) {
        module->zero_grad();
        (rank == 0 ? module->a->weight.sum() : 2 * module->b->weight.sum()).backward();
        EXPECT_LE(difference(module->a->weight.grad(), torch::full({5, 5}, 1.0 / world)), 1e-6);
        if (world > 1) {
          const double mean = 2.0 * (world - 1) / world;
          EXPECT_LE(difference(module->b->weight.grad(), torch::full({5, 5}, mean)), 1e-6);
        }
        EXPECT_FALSE(module->a->bias.grad().defined()) << "used nowhere";
      }
    }
  });
}

TEST_P(Replicate, UnusedEverywhereKeepsTheGradientItHad) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    ReplicateOptions options;
    options.find_unused_parameters = true;
    replicate(module, options);
    torch::optim::AdamW optimizer(module->parameters(),
                                  torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    const Tensor before = module->b->weight.detach().clone();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      module->a->weight.sum().backward();
      optimizer.step();
    }
    EXPECT_FALSE(module->b->weight.grad().defined());
    EXPECT_EQ(difference(module->b->weight, before), 0) << "decayed without gradient";
    module->b->weight.mutable_grad() = torch::ones({5, 5});
    module->a->weight.sum().backward();
    EXPECT_LE(difference(module->b->weight.grad(), torch::ones({5, 5})), 1e-6);
  });
}

}  // namespace
}  // namespace fsdp2::testing::replicate_modules
