// A model of 405 billion parameters, wrapped and stepped as one rank of 1,024, in this process, by
// sizes alone.

#include "support/fake_world.h"
#include "support/ranks.h"
#include "train/llama.h"
#include "train/plan.h"
#include "train/process_stats.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <chrono>
#include <gtest/gtest.h>

namespace fsdp2::train::simulated_llama {
namespace {

using fsdp2::testing::FakeWorld;

constexpr int kWorld = 1024;
constexpr int64_t kParameters = 405853388800;

LlamaConfig config() {
  return resolve({.dim = 16384,
                  .layers = 126,
                  .heads = 128,
                  .kv_heads = 8,
                  .ffn = 53248,
                  .vocab = 128256,
                  .seq = 8192});
}

Llama wrapped() {
  Llama model = [] {
    const MetaDeviceGuard meta;
    return Llama(config());
  }();
  FullyShardOptions options;
  options.mesh = init_device_mesh("meta", {kWorld});
  options.mp_policy.param_dtype = torch::kBFloat16;
  options.mp_policy.reduce_dtype = torch::kFloat;
  for (const auto& block : *model->layers) fully_shard(block, options);
  fully_shard(model, options);
  return model;
}

int64_t local_parameters(const Llama& model) {
  int64_t count = 0;
  for (const torch::Tensor& parameter : model->parameters())
    count += DTensor(parameter).to_local().numel();
  return count;
}

TEST(SimulatedLlama, StepsInAMinuteAndTwoGibibytes) {
  fsdp2::testing::on_processes(
      1,
      [](int) {
        const auto start = std::chrono::steady_clock::now();
        const FakeWorld world(777, kWorld);
        Llama model = wrapped();
        torch::optim::AdamW optimizer(model->parameters());
        const torch::Tensor x =
            torch::empty({1, 8192}, torch::TensorOptions(torch::kLong).device(torch::kMeta));
        for (int step = 0; step < 2; ++step) {
          reset_collective_counts();
          next_token_loss(model, x, x).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        const CollectiveCounts counts = collective_counts();
        EXPECT_EQ(counts.all_gathers, 127 + 125);
        EXPECT_EQ(counts.reduce_scatters, 127);
        // Twice a bf16 copy and once an fp32 one, but for the block and the root gathered once.
        EXPECT_GT(counts.bytes, 2 * kParameters * 2 * 0.95 + kParameters * 4);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        EXPECT_LT(seconds.count(), 60);
        EXPECT_LT(memory_stats().peak, int64_t{2} << 20);  // KiB
      },
      std::chrono::seconds(170));
}

TEST(SimulatedLlama, ShardsAddUpToTheModel) {
  int64_t sum = 0, first = 0, middle = 0, last = 0;
  std::vector<std::vector<int64_t>> shapes;
  {
    const MetaDeviceGuard meta;
    for (const torch::Tensor& parameter : Llama(config())->parameters())
      shapes.push_back(parameter.sizes().vec());
  }
  for (int rank = 0; rank < kWorld; ++rank) {
    int64_t held = 0;
    for (const std::vector<int64_t>& shape : shapes)
      held += chunk_of(shape[0], kWorld, rank).length * (shape.size() > 1 ? shape[1] : 1);
    sum += held;
    if (rank == 0) first = held;
    if (rank == 777) middle = held;
    if (rank == kWorld - 1) last = held;
  }
  EXPECT_EQ(sum, kParameters);
  EXPECT_LT(last, first);
  const std::pair<int, int64_t> real[] = {{0, first}, {777, middle}, {kWorld - 1, last}};
  for (const auto& [rank, held] : real) {
    const FakeWorld world(rank, kWorld);
    EXPECT_EQ(local_parameters(wrapped()), held) << "rank " << rank;
  }
  PlanOptions plan;
  plan.model = config();
  plan.shard = kWorld;
  EXPECT_EQ(plan_memory(plan).shard_parameters, first);
}

}  // namespace
}  // namespace fsdp2::train::simulated_llama
