// fully_shard at 1 to 4 ranks against the plain module on the concatenated batch.

#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/training.h"

namespace fsdp2::testing {
namespace {

using torch::Tensor;

class FullyShard : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FullyShard, ::testing::Values(1, 2, 3, 4));

void shard(Net& net, std::optional<bool> reshard_after_forward = std::nullopt) {
  FullyShardOptions options;
  options.reshard_after_forward = reshard_after_forward;
  for (auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net);
}

struct Batch {
  Tensor ids, targets;
  Batch(int step, int world) {
    torch::manual_seed(1000 + step);
    ids = torch::randint(0, 11, {world, 4, 5});
    targets = torch::randint(0, 11, {world, 4, 5});
  }
};

struct Pair {
  Net plain, sharded;
  Pair() {
    torch::manual_seed(3);
    plain = Net();
    sharded = Net();
    copy_values(*sharded, *plain);
  }
};

TEST_P(FullyShard, TwentyStepsEqualThePlainModule) {
  for (std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(false)}) {
    on_ranks(GetParam(), [&](int rank) {
      const int world = GetParam();
      Pair nets;
      shard(nets.sharded, reshard);
      torch::optim::AdamW plain_optimizer(nets.plain->parameters(),
                                          torch::optim::AdamWOptions(1e-2));
      torch::optim::AdamW optimizer(nets.sharded->parameters(), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 20; ++step) {
        Batch batch(step, world);
        Tensor expected = nets.plain->loss(batch.ids.view({-1, 5}), batch.targets);
        Tensor loss = nets.sharded->loss(batch.ids[rank], batch.targets[rank]);
        const double mean = mean_over_ranks(loss);
        EXPECT_NEAR(mean, expected.item<double>(), 1e-6 * expected.item<double>())
            << "step " << step;
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        expected.backward();
        loss.backward();
        expect_same_module(*nets.sharded, *nets.plain, world == 1 ? 0 : 5e-6);
        plain_optimizer.step();
        optimizer.step();
      }
    });
  }
}

TEST_P(FullyShard, ParametersAreShardsAndMembersAreWhole) {
  on_ranks(GetParam(), [&](int rank) {
    Net net;
    shard(net);
    for (const auto& item : net->named_parameters()) {
      ASSERT_TRUE(is_dtensor(item.value())) << item.key();
      DTensor shard(item.value());
      EXPECT_TRUE(shard.placements()[0].is_shard(0)) << item.key();
      EXPECT_EQ(shard.to_local().size(0), chunk_of(shard.size(0), GetParam(), rank).length);
      EXPECT_TRUE(item.value().requires_grad());
      EXPECT_TRUE(item.value().is_leaf());
    }
    EXPECT_FALSE(is_dtensor(net->head->weight));
    EXPECT_EQ(net->head->weight.sizes(), torch::IntArrayRef({11, 6}));
    EXPECT_EQ(net->parameters().size(), Net()->parameters().size());
  });
}

TEST_P(FullyShard, CollectivesOfAStepAreNotMoreThanTheGroupsNeed) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Net net;
    shard(net);
    for (int step = 0; step < 3; ++step) {
      Batch batch(step, world);
      reset_collective_counts();
      net->loss(batch.ids[rank], batch.targets[rank]).backward();
      const CollectiveCounts counts = collective_counts();
      if (world == 1) {
        EXPECT_EQ(counts.all_gathers + counts.reduce_scatters, 0);
        continue;
      }
      // Root once, each of three blocks in forward, all but the last again in backward.
      EXPECT_EQ(counts.all_gathers, 1 + 3 + 2) << "step " << step;
      EXPECT_EQ(counts.reduce_scatters, 4) << "step " << step;
      EXPECT_EQ(counts.all_reduces + counts.broadcasts + counts.others, 0);
    }
  });
}

TEST_P(FullyShard, SeveralForwardsBeforeBackwards) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Pair nets;
    shard(nets.sharded);
    for (int step = 0; step < 2; ++step) {
      Batch a(2 * step, world), b(2 * step + 1, world);
      Tensor first = nets.sharded->loss(a.ids[rank], a.targets[rank]);
      Tensor second = nets.sharded->loss(b.ids[rank], b.targets[rank]);
      second.backward();
      first.backward();
      nets.plain->loss(a.ids.view({-1, 5}), a.targets).backward();
      nets.plain->loss(b.ids.view({-1, 5}), b.targets).backward();
      expect_same_module(*nets.sharded, *nets.plain, 5e-6);  // gradients accumulate over steps
      Tensor sum = nets.sharded->loss(a.ids[rank], a.targets[rank]) +
                   nets.sharded->loss(b.ids[rank], b.targets[rank]);
      sum.backward();
      (nets.plain->loss(a.ids.view({-1, 5}), a.targets) +
       nets.plain->loss(b.ids.view({-1, 5}), b.targets))
          .backward();
      expect_same_module(*nets.sharded, *nets.plain, 1e-5);
    }
  });
}

TEST_P(FullyShard, EvaluationBetweenSteps) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Pair nets;
    shard(nets.sharded);
    torch::optim::SGD plain_optimizer(nets.plain->parameters(), 0.1);
    torch::optim::SGD optimizer(nets.sharded->parameters(), 0.1);
    for (int step = 0; step < 6; ++step) {
      Batch batch(step, world);
      {
        torch::NoGradGuard no_grad;
        Tensor ids = batch.ids[0];
        EXPECT_LE(difference(nets.sharded->forward(ids), nets.plain->forward(ids)), 2e-6);
      }
      nets.plain->loss(batch.ids.view({-1, 5}), batch.targets).backward();
      Tensor loss = nets.sharded->loss(batch.ids[rank], batch.targets[rank]);
      if (step % 2 == 0) {  // between forward and backward as well
        torch::InferenceMode inference;
        nets.sharded->forward(batch.ids[0]);
      }
      loss.backward();
      expect_same_module(*nets.sharded, *nets.plain, 5e-6);
      plain_optimizer.step();
      optimizer.step();
      {
        torch::InferenceMode inference;
        Tensor ids = batch.ids[0];
        EXPECT_LE(difference(nets.sharded->forward(ids), nets.plain->forward(ids)), 2e-6);
      }
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

TEST_P(FullyShard, FrozenAndThawedParameters) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Pair nets;
    for (Net* net : {&nets.plain, &nets.sharded}) {
      (*net)->embedding->weight.set_requires_grad(false);  // before wrapping
    }
    shard(nets.sharded);
    auto freeze = [&](const char* name, bool on) {
      nets.plain->named_parameters()[name].set_requires_grad(!on);
      nets.sharded->named_parameters()[name].set_requires_grad(!on);
    };
    for (int step = 0; step < 3; ++step) {
      if (step == 1) freeze("blocks.1.a.weight", true);
      if (step == 2) {
        freeze("blocks.1.a.weight", false);
        freeze("embedding.weight", false);
        freeze("head.bias", true);
      }
      Batch batch(step, world);
      nets.sharded->zero_grad();
      nets.plain->zero_grad();
      nets.plain->loss(batch.ids.view({-1, 5}), batch.targets).backward();
      nets.sharded->loss(batch.ids[rank], batch.targets[rank]).backward();
      expect_same_module(*nets.sharded, *nets.plain, 5e-6);
    }
  });
}

TEST_P(FullyShard, UnusedParametersKeepAnUndefinedGradient) {
  on_ranks(GetParam(), [&](int rank) {
    struct TwoImpl : torch::nn::Module {
      torch::nn::Linear used{nullptr}, unused{nullptr};
      TwoImpl() {
        used = register_module("used", torch::nn::Linear(3, 5));
        unused = register_module("unused", torch::nn::Linear(3, 5));
      }
    };
    for (bool own_group : {false, true}) {
      auto module = std::make_shared<TwoImpl>();
      if (own_group) fully_shard(module->unused);
      fully_shard(module);
      module->used(torch::full({2, 3}, rank + 1.0)).sum().backward();
      EXPECT_FALSE(module->named_parameters()["unused.weight"].grad().defined());
      EXPECT_FALSE(module->named_parameters()["unused.bias"].grad().defined());
      const double mean = (GetParam() + 1) / 2.0;
      EXPECT_LE(difference(full(module->named_parameters()["used.weight"].grad()),
                           torch::full({5, 3}, 2 * mean)),
                1e-6);
    }
  });
}

TEST_P(FullyShard, AListOfModulesIsOneGroup) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Pair nets;
    for (auto& block : *nets.sharded->blocks) fully_shard(block);
    fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{nets.sharded->embedding.ptr(),
                                                                nets.sharded->head.ptr()});
    FSDPModule root = fully_shard(nets.sharded);
    EXPECT_TRUE(root.parameter_names().empty());
    EXPECT_EQ(as_fsdp(*nets.sharded->head).parameter_names().size(), 3u);
    Batch batch(0, world);
    nets.plain->loss(batch.ids.view({-1, 5}), batch.targets).backward();
    nets.sharded->loss(batch.ids[rank], batch.targets[rank]).backward();
    expect_same_module(*nets.sharded, *nets.plain, 5e-6);
  });
}

TEST_P(FullyShard, ControlsOutliveTheHandleAndFollowTheModule) {
  on_ranks(GetParam(), [&](int) {
    torch::manual_seed(3);  // each rank keeps its part of its own values
    Net net;
    Tensor expected = net->head->weight.detach().clone();
    shard(net);
    EXPECT_TRUE(is_fsdp(*net));
    EXPECT_FALSE(is_fsdp(*net->head));
    EXPECT_THROW(as_fsdp(*net->head), c10::Error);
    FSDPModule controls = as_fsdp(*net);
    EXPECT_FALSE(controls.is_unsharded());
    EXPECT_THROW(net->head->weight.data_ptr(), c10::Error);
    {
      UnshardHandle handle = controls.unshard(/*async_op=*/true);
      handle.wait();
      ASSERT_TRUE(controls.is_unsharded());
      EXPECT_EQ(std::memcmp(net->head->weight.data_ptr(), expected.data_ptr(), expected.nbytes()),
                0);
    }
    controls.reshard();
    EXPECT_FALSE(controls.is_unsharded());
    EXPECT_THROW(net->head->weight.data_ptr(), c10::Error);
    controls.unshard(/*async_op=*/true);  // never waited for
    EXPECT_EQ(difference(net->head->weight + 0, expected), 0);
    net = nullptr;
    EXPECT_THROW(controls.reshard(), c10::Error);
  });
}

TEST_P(FullyShard, ClippingUnmodifiedIsGlobal) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    Pair nets;
    shard(nets.sharded);
    Batch batch(0, world);
    nets.plain->loss(batch.ids.view({-1, 5}), batch.targets).backward();
    nets.sharded->loss(batch.ids[rank], batch.targets[rank]).backward();
    const double expected = torch::nn::utils::clip_grad_norm_(nets.plain->parameters(), 0.1);
    const double norm = torch::nn::utils::clip_grad_norm_(nets.sharded->parameters(), 0.1);
    EXPECT_NEAR(norm, expected, 1e-5 * expected);
    expect_same_module(*nets.sharded, *nets.plain, 1e-6);
  });
}

void expect_error(const std::function<void()>& run, const std::string& part) {
  EXPECT_THAT(testing::error_of(run), ::testing::HasSubstr(part));
}

TEST_P(FullyShard, MisuseIsRefused) {
  on_ranks(GetParam(), [&](int) {
    Net net;
    expect_error([&] { fully_shard(net->blocks); }, "wrap its elements");
    shard(net);
    expect_error([&] { fully_shard(net); }, "before");
    expect_error([&] { fully_shard(net->head); }, "wrap children before");
    net->forward(torch::zeros({1, 2}, torch::kLong)).sum().backward();
    torch::NoGradGuard no_grad;
    expect_error([&] { net->head->weight.mul_(2); }, "'head.weight'");
    expect_error([&] { torch::nn::init::zeros_(net->blocks[0]->as<BlockImpl>()->a->weight); },
                 "'blocks.0.a.weight'");
    // A module without parameters is wrapped, as in FSDP2, and does nothing.
    torch::nn::ReLU relu;
    FSDPModule controls = fully_shard(relu);
    EXPECT_TRUE(controls.parameter_names().empty());
    controls.unshard();
    controls.reshard();
  });
}

struct ContainersImpl : torch::nn::Module {
  torch::nn::ParameterList list;
  torch::nn::ParameterDict dict;
  ContainersImpl() {
    list = register_module("list", torch::nn::ParameterList());
    list->append(torch::randn({5, 3}, torch::requires_grad()));
    list->append(torch::randn({3}, torch::requires_grad()));
    dict = register_module("dict", torch::nn::ParameterDict());
    dict->insert("w", torch::randn({3, 5}, torch::requires_grad()));
  }
  Tensor forward(Tensor x) {
    return torch::matmul(torch::matmul(x, list[0]) + list[1], (*dict)["w"]);
  }
};
TORCH_MODULE(Containers);

TEST_P(FullyShard, ParameterListsAndDictsStayWholeInForward) {
  on_ranks(GetParam(), [&](int rank) {
    const int world = GetParam();
    torch::manual_seed(5);
    Containers plain, sharded;
    copy_values(*sharded, *plain);
    fully_shard(sharded);
    torch::optim::AdamW plain_optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW optimizer(sharded->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      Tensor x = torch::randn({world, 4, 5});
      Tensor expected = plain->forward(x.view({-1, 5})).pow(2).mean();
      Tensor loss = sharded->forward(x[rank]).pow(2).mean();
      EXPECT_NEAR(mean_over_ranks(loss), expected.item<double>(), 1e-5);
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      expected.backward();
      loss.backward();
      expect_same_module(*sharded, *plain, 1e-5);
      plain_optimizer.step();
      optimizer.step();
    }
  });
}

TEST_P(FullyShard, AnAliasMadeBeforeWrappingIsRefused) {
  on_ranks(GetParam(), [&](int) {
    Net net;
    Tensor cached;
    {
      torch::NoGradGuard no_grad;
      cached = net->head->weight.view({-1});
    }
    expect_error([&] { fully_shard(net); }, "'head.weight' shares its memory");
    EXPECT_FALSE(is_dtensor(net->parameters()[0])) << "nothing may have changed";
    cached.reset();
    fully_shard(net);
  });
}

TEST_P(FullyShard, AParameterRegisteredAfterWrappingIsAnError) {
  on_ranks(GetParam(), [&](int rank) {
    Net net;
    shard(net);
    Batch batch(0, GetParam());
    net->register_parameter("late", torch::ones({3}));
    Tensor loss = net->loss(batch.ids[rank], batch.targets[rank]);
    expect_error([&] { loss.backward(); }, "'late'");
  });
}

}  // namespace
}  // namespace fsdp2::testing
