// Gathered bytes never outlive a write to the shards, whichever way it goes.

#include "support/ranks.h"
#include "support/twins.h"

#include <fsdp2/activation_checkpoint.h>

namespace fsdp2::testing::stale_bytes {
namespace {

using torch::Tensor;

class StaleBytes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, StaleBytes, ::testing::Values(1, 2, 3));

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

Tensor loss(TwoLinear& module, int rank) { return module->forward(input(rank)).pow(2).mean(); }

TEST_P(StaleBytes, TouchesBetweenBackwardAndStep) {
  on_ranks(GetParam(), [](int) {
    for (bool reshard : {false, true}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, true, reshard);
      torch::optim::SGD plain(twins.plain->parameters(), 0.3),
          ours(twins.sharded->parameters(), 0.3);
      for (int step = 0; step < 4; ++step) {
        twins.zero_grad();
        twins.backward(loss);
        if (step % 2 == 0) {
          torch::NoGradGuard no_grad;  // for the log
          EXPECT_LE(difference(twins.sharded->a->weight.norm(), twins.plain->a->weight.norm()),
                    1e-6);
          EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-6);
        } else {
          EXPECT_LE(difference(twins.sharded->b->weight.norm(), twins.plain->b->weight.norm()),
                    1e-6);
        }
        plain.step();
        ours.step();
        EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-6)
            << "step " << step;
        twins.expect_same(1e-5);
      }
    }
  });
}

/// Doubles a parameter; gets the shard, or the plain parameter.
using Write = std::function<void(const Tensor&)>;

std::vector<std::pair<const char*, Write>> writes() {
  auto local = [](const Tensor& t) { return is_dtensor(t) ? DTensor(t).to_local() : t; };
  return {
      {"in place", [](const Tensor& t) { t.mul_(2); }},
      {"data()", [](const Tensor& t) { t.data().mul_(2); }},
      {"detach()", [](const Tensor& t) { t.detach().mul_(2); }},
      {"variable_data()", [](const Tensor& t) { t.variable_data().mul_(2); }},
      {"copy_", [](const Tensor& t) { t.copy_(t * 2); }},
      {"copy_ of the whole", [](const Tensor& t) { t.copy_(full(t) * 2); }},
      {"foreach", [](const Tensor& t) { torch::_foreach_mul_({t}, 2.0); }},
      {"out=",
       [](const Tensor& t) {
         Tensor out = t;
         torch::mul_out(out, t, torch::scalar_tensor(2.0));
       }},
      {"to_local()", [local](const Tensor& t) { local(t).mul_(2); }},
      {"view of to_local()", [local](const Tensor& t) { local(t).view({-1}).mul_(2); }},
      {"detach() of to_local()", [local](const Tensor& t) { local(t).detach().mul_(2); }},
      {"lerp_ towards an average",
       [](const Tensor& t) {
         Tensor average = t.detach().clone();
         average.lerp_(t * 3, 0.5);
         t.copy_(average);
       }},
  };
}

TEST_P(StaleBytes, EveryWayToWriteAShardIsSeen) {
  on_ranks(GetParam(), [](int) {
    for (const auto& [name, write] : writes()) {
      for (bool reshard : {false, true}) {
        Twins<TwoLinear> twins;
        wrap_layers(twins.sharded, true, reshard);
        for (int round = 0; round < 2; ++round) {
          torch::NoGradGuard no_grad;
          EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-4)
              << "before " << name;
          for (auto* module : twins.both()) write((*module)->named_parameters()["b.weight"]);
          EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-4)
              << "after " << name;
        }
        twins.backward(loss);
        twins.expect_same(1e-4);
      }
    }
  });
}

TEST_P(StaleBytes, WritesBeforeBackwardRunsForwardAgain) {
  const auto checkpointed = [](TwoLinear& module, int rank) {
    return checkpoint([&module](const Tensor& x) { return module->forward(x); }, input(rank))
        .pow(2)
        .mean();
  };
  on_ranks(GetParam(), [&](int) {
    for (const auto& [name, write] : writes()) {
      SCOPED_TRACE(name);
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, true);
      // Written when all of forward has run, so it is the second run that sees it.
      const auto write_both = [&, write = write] {
        torch::NoGradGuard no_grad;
        for (auto* module : twins.both()) write((*module)->named_parameters()["a.weight"]);
      };
      Tensor plain = torch::zeros({});
      for (int rank = 0; rank < get_world_size(); ++rank)
        plain = plain + checkpointed(twins.plain, rank);
      const Tensor ours = checkpointed(twins.sharded, get_rank());
      write_both();
      (plain / get_world_size()).backward();
      ours.backward();
      twins.expect_same(1e-4);
    }
  });
}

TEST_P(StaleBytes, WritesInInferenceModeAndWhileUnsharded) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    FSDPModule b = as_fsdp(*twins.sharded->b);
    b.unshard();
    for (auto* module : twins.both()) {
      torch::InferenceMode inference;
      (*module)->named_parameters()["b.weight"].mul_(3);
    }
    EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-5);
    b.reshard();
    b.unshard(/*async_op=*/true);
    for (auto* module : twins.both()) {
      torch::NoGradGuard no_grad;
      (*module)->named_parameters()["b.weight"].add_(1);
    }
    EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-5);
    twins.backward(loss);
    twins.expect_same(1e-5);
  });
}

TEST_P(StaleBytes, AveragedWeightsSwappedInForEvaluation) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true, /*reshard_after_forward=*/false);
    torch::optim::AdamW plain(twins.plain->parameters(), 0.05),
        ours(twins.sharded->parameters(), 0.05);
    std::array<std::vector<Tensor>, 2> average, kept;
    for (size_t i = 0; i < 2; ++i) {
      for (const Tensor& p : (*twins.both()[i])->parameters())
        average[i].push_back(p.detach().clone());
    }
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward(loss);
      plain.step();
      ours.step();
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 2; ++i) {
        const auto parameters = (*twins.both()[i])->parameters();
        kept[i].clear();
        for (size_t k = 0; k < parameters.size(); ++k) {
          average[i][k].mul_(0.5).add_(parameters[k], 0.5);
          kept[i].push_back(parameters[k].clone());
          parameters[k].copy_(average[i][k]);
        }
      }
      EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 2e-5) << "average";
      for (size_t i = 0; i < 2; ++i) {
        const auto parameters = (*twins.both()[i])->parameters();
        for (size_t k = 0; k < parameters.size(); ++k) parameters[k].copy_(kept[i][k]);
      }
      EXPECT_LE(difference(loss(twins.sharded, 0), loss(twins.plain, 0)), 2e-5) << "weights";
    }
    twins.expect_same(2e-4);
  });
}

}  // namespace
}  // namespace fsdp2::testing::stale_bytes
