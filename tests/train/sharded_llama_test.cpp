// The decoder, sharded block by block, against the plain one: the same bits at one rank, the same
// losses at any number.

#include "support/ranks.h"
#include "support/training.h"
#include "train/init.h"
#include "train/llama.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace fsdp2::train {
namespace {

using fsdp2::testing::copy_values;
using fsdp2::testing::difference;
using fsdp2::testing::expect_same_module;
using fsdp2::testing::mean_over_ranks;
using fsdp2::testing::on_ranks;
using torch::Tensor;

constexpr int kSteps = 20;

struct Pair {
  Llama plain{nullptr}, sharded{nullptr};
  Pair(bool tied, torch::ScalarType dtype) {
    const LlamaConfig config = resolve({.dim = 12,
                                        .layers = 3,
                                        .heads = 2,
                                        .kv_heads = 1,
                                        .ffn = 17,
                                        .vocab = 61,
                                        .seq = 8,
                                        .tied = tied});
    plain = Llama(config);
    sharded = Llama(config);
    init_weights(*plain, 7, config.layers);
    copy_values(*sharded, *plain);
    plain->to(dtype);
    sharded->to(dtype);
    for (auto& layer : *sharded->layers) fully_shard(layer);
    fully_shard(sharded);
  }
};

void expect_same_training(int world, bool tied, torch::ScalarType dtype, double bound) {
  on_ranks(world, [&](int rank) {
    Pair models(tied, dtype);
    const torch::optim::AdamWOptions options(1e-3);
    torch::optim::AdamW plain_optimizer(models.plain->parameters(), options);
    torch::optim::AdamW optimizer(models.sharded->parameters(), options);
    for (int step = 0; step < kSteps; ++step) {
      torch::manual_seed(step);
      const Tensor x = torch::randint(0, 61, {world, 2, 8});
      const Tensor y = torch::randint(0, 61, {world, 2, 8});
      const Tensor expected = next_token_loss(models.plain, x.view({-1, 8}), y.view({-1, 8}));
      const Tensor loss = next_token_loss(models.sharded, x[rank], y[rank]);
      const double value = expected.item<double>();
      ASSERT_NEAR(mean_over_ranks(loss), value, bound * value) << "step " << step;
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      expected.backward();
      loss.backward();
      if (world == 1) expect_same_module(*models.sharded, *models.plain, 0);
      plain_optimizer.step();
      optimizer.step();
    }
    if (world == 1) expect_same_module(*models.sharded, *models.plain, 0, /*gradients=*/false);
  });
}

TEST(ShardedLlama, HasTheSameBitsOnOneRank) {
  for (const bool tied : {false, true}) {
    expect_same_training(1, tied, torch::kFloat, 0);
    expect_same_training(1, tied, torch::kBFloat16, 0);
  }
}

TEST(ShardedLlama, HasTheSameLossesOnSeveralRanks) {
  for (const int world : {2, 3, 4}) {
    for (const bool tied : {false, true}) expect_same_training(world, tied, torch::kFloat, 1e-6);
  }
}

}  // namespace
}  // namespace fsdp2::train
