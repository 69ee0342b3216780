// The forecast of a rank's memory against what a run allocates.

#include "train/plan.h"

#include "support/counting_allocator.h"
#include "support/ranks.h"
#include "train/init.h"
#include "train/sharding.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <gtest/gtest.h>
#include <limits>
#include <memory>

namespace fsdp2::train::plan_test {
namespace {

using fsdp2::testing::CountingAllocator;
using fsdp2::testing::on_ranks;

struct Measured {
  size_t rest = 0, peak = 0;
};

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const PlanOptions& plan, Llama& model) {
  const std::string& name = plan.optimizer;
  if (plan.nvme_moments) {
    optim::AdamWExtras extras;
    extras.nvme_offload = NvmeOffloadPolicy{::testing::TempDir()};
    return std::make_unique<optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(),
                                          std::move(extras));
  }
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(model->parameters());
  if (name == "adam") return std::make_unique<torch::optim::Adam>(model->parameters());
  torch::optim::SGDOptions options(0.1);
  if (name == "momentum") options.momentum(0.9);
  return std::make_unique<torch::optim::SGD>(model->parameters(), options);
}

/// next_token_loss with blocks that run again in backward.
torch::Tensor checkpointed_loss(Llama& model, const torch::Tensor& x) {
  torch::Tensor h = model->tok_embeddings->forward(x);
  const Rotary made = make_rotary(model->config().head_dim(), x.size(1));
  const auto like = h.options().requires_grad(false);
  const Rotary rotary{made.cos.to(like), made.sin.to(like)};
  for (const auto& layer : *model->layers) {
    auto* block = layer->as<Block>();
    h = checkpoint([block, rotary](const torch::Tensor& t) { return block->forward(t, rotary); },
                   h);
  }
  const torch::Tensor logits = model->output->forward(model->norm->forward(h)).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.view({-1, logits.size(-1)}), x.view(-1));
}

Measured measure(const PlanOptions& options) {
  CountingAllocator& allocator = CountingAllocator::install();
  const size_t before = allocator.live_bytes();
  Llama model(options.model);
  init_weights(*model, 1, options.model.layers);
  ShardingOptions sharding;
  sharding.replicate = options.replicate;
  sharding.reshard_after_forward = options.reshard_after_forward;
  sharding.reshard_to = options.reshard_to;
  sharding.offload = options.offload;
  sharding.param_dtype = options.param_dtype;
  sharding.reduce_dtype = options.reduce_dtype;
  shard(model, sharding);
  const auto optimizer = optimizer_of(options, model);
  const torch::Tensor x = torch::ones({options.batch, options.model.seq}, torch::kLong);
  // The backend's threads let go of buffers a little late, which only adds: the least of several
  // steps counts. The first one makes the optimizer's state.
  Measured measured{.peak = std::numeric_limits<size_t>::max()};
  for (int step = 0; step < 6; ++step) {
    size_t peak = 0;
    allocator.on_allocate = [&] { peak = std::max(peak, allocator.live_bytes() - before); };
    (options.checkpoint ? checkpointed_loss(model, x) : next_token_loss(model, x, x)).backward();
    optimizer->step();
    optimizer->zero_grad();
    allocator.on_allocate = nullptr;
    if (step > 0) measured.peak = std::min(measured.peak, peak);
    wait(barrier(world_group()));
  }
  measured.rest = allocator.live_bytes() - before;
  return measured;
}

void expect_forecast(PlanOptions options, const std::vector<int>& worlds = {1, 2, 4}) {
  setenv("FSDP2_SHARED_MEMORY", "off", 1);  // a plan is of a rank with memory of its own
  for (const int world : worlds) {
    options.shard = world / options.replicate;
    on_ranks(world, [&](int rank) {
      const MemoryPlan plan = plan_memory(options);
      const Measured measured = measure(options);
      if (rank > 0) return;
      const auto text = ::testing::Message() << world << " ranks:\n" << plan_table(options, plan);
      const double rest = static_cast<double>(plan.moments.front().total());
      const double peak = static_cast<double>(plan.peak().total());
      EXPECT_NEAR(static_cast<double>(measured.rest), rest, 0.05 * rest) << text;
      EXPECT_NEAR(static_cast<double>(measured.peak), peak, 0.05 * peak) << text;
    });
  }
}

PlanOptions deep() {
  PlanOptions options;
  options.model = resolve({.dim = 64, .layers = 6, .heads = 4, .vocab = 256, .seq = 64});
  options.batch = 2;
  return options;
}

TEST(Plan, ForecastsADeepModel) { expect_forecast(deep()); }

TEST(Plan, ForecastsAModelThatIsMostlyVocabulary) {
  PlanOptions options = deep();
  options.model = resolve({.dim = 64, .layers = 2, .heads = 4, .vocab = 4000, .seq = 8});
  expect_forecast(options);
}

TEST(Plan, ForecastsBlocksThatStayWhole) {
  PlanOptions options = deep();
  options.reshard_after_forward = false;
  expect_forecast(options);
}

TEST(Plan, ForecastsMixedPrecision) {
  PlanOptions options = deep();
  options.param_dtype = "bf16";
  expect_forecast(options);
  options.reduce_dtype = "bf16";
  expect_forecast(options);
}

TEST(Plan, ForecastsReplicas) {
  PlanOptions options = deep();
  options.replicate = 2;
  expect_forecast(options, {4});
  options.replicate = 4;
  expect_forecast(options, {4});
}

TEST(Plan, ForecastsOtherOptimizers) {
  PlanOptions options = deep();
  options.model.tied = true;
  for (const char* name : {"adam", "momentum", "sgd"}) {
    options.optimizer = name;
    expect_forecast(options, {2});
  }
}

TEST(Plan, ForecastsOffload) {
  PlanOptions options = deep();
  options.offload = true;
  expect_forecast(options, {2});
  const MemoryPlan plan = plan_memory(options);
  const auto json = plan_json(options, plan);
  EXPECT_LT(json["device_peak_bytes"].get<int64_t>(), plan.peak().total());
}

TEST(Plan, ForecastsCheckpointedBlocks) {
  PlanOptions options = deep();
  options.checkpoint = true;
  for (const int64_t seq : {64, 256}) {
    options.model.seq = seq;
    for (const char* dtype : {"fp32", "bf16"}) {
      options.param_dtype = dtype;
      expect_forecast(options, {1, 2});
    }
  }
}

TEST(Plan, ForecastsMomentsInFiles) {
  PlanOptions options = deep();
  options.nvme_moments = true;
  expect_forecast(options);
}

TEST(Plan, ForecastsPartsThatAreKeptAfterForward) {
  PlanOptions options = deep();
  options.batch = 1;
  for (const int64_t ranks : {1, 2, 4}) {
    options.reshard_to = ranks;
    expect_forecast(options, {4});
  }
}

TEST(Plan, RefusesWhatMakesNoSense) {
  PlanOptions options = deep();
  options.optimizer = "lion";
  EXPECT_THROW(plan_memory(options), c10::ValueError);
  options = deep();
  options.shard = 0;
  EXPECT_THROW(plan_memory(options), c10::ValueError);
  options = deep();
  options.shard = 4;
  options.reshard_to = 3;
  EXPECT_THROW(plan_memory(options), c10::ValueError);
  options = deep();
  options.nvme_moments = true;
  options.optimizer = "sgd";
  EXPECT_THROW(plan_memory(options), c10::ValueError);
}

}  // namespace
}  // namespace fsdp2::train::plan_test
