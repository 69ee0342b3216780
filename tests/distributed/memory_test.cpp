// With reshard_after_forward no more than the root's and two groups' whole parameters are alive at
// any time, the first iteration included, and after a step only shards are.

#include "support/counting_allocator.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <cstdlib>
#include <thread>

namespace fsdp2::testing {
namespace {

using torch::Tensor;

/// Of parameters that are copied: those that ranks share come from no allocator.
class Memory : public ::testing::TestWithParam<int> {
  void SetUp() override { setenv("FSDP2_SHARED_MEMORY", "off", 1); }
  void TearDown() override { unsetenv("FSDP2_SHARED_MEMORY"); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, Memory, ::testing::Values(1, 2, 3));

// Nothing else in this model has the size of a block's weight [103, 51], so its blocks can be
// counted.
constexpr int64_t kDim = 51;
constexpr size_t kWeightBytes = (2 * kDim + 1) * kDim * sizeof(float);
constexpr int kDepth = 6;

/// The backend's threads drop their buffers a little after the wait for them has returned.
size_t settled_bytes(const CountingAllocator& allocator, size_t expected) {
  for (int i = 0; i < 200 && allocator.live_bytes() > expected; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return allocator.live_bytes();
}

Net sharded_net() {
  torch::manual_seed(1);
  Net net(kDepth, kDim);
  for (auto& block : *net->blocks) fully_shard(block);
  fully_shard(net);
  return net;
}

TEST_P(Memory, ForwardHoldsTwoBlocksAtMost) {
  on_ranks(GetParam(), [&](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    Net net = sharded_net();
    // On one rank a shard is as large as its parameter, and serves as it.
    const size_t shards = allocator.alive(kWeightBytes);
    size_t most = 0;
    allocator.on_allocate = [&] { most = std::max(most, allocator.alive(kWeightBytes) - shards); };
    const Tensor ids = torch::randint(0, 11, {2, 3});
    for (int iteration = 0; iteration < 3; ++iteration) {
      torch::NoGradGuard no_grad;
      net->forward(ids);
      // Two such weights a block.
      EXPECT_LE(most, GetParam() == 1 ? 0u : 2 * 2u) << "iteration " << iteration;
      EXPECT_GE(most, GetParam() == 1 ? 0u : 2u);
    }
    most = 0;
    for (int iteration = 0; iteration < 3; ++iteration) {
      net->forward(ids);
      EXPECT_LE(most, 2 * 2u) << "iteration " << iteration << " with gradients";
    }
    allocator.on_allocate = nullptr;
  });
}

TEST_P(Memory, BackwardHoldsTwoBlocksAtMostAndAStepLeavesShardsOnly) {
  on_ranks(GetParam(), [&](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    Net net = sharded_net();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    int most = 0;
    auto count = [&] {
      int whole = 0;
      for (auto& block : *net->blocks) whole += as_fsdp(*block).is_unsharded();
      most = std::max(most, whole);
    };
    size_t after_first = 0;
    for (int iteration = 0; iteration < 4; ++iteration) {
      allocator.on_allocate = count;
      net->loss(torch::randint(0, 11, {2, 3}), torch::randint(0, 11, {2, 3})).backward();
      allocator.on_allocate = nullptr;
      EXPECT_LE(most, 2) << "iteration " << iteration;
      EXPECT_GE(most, 1);
      optimizer.step();
      optimizer.zero_grad();
      for (auto& block : *net->blocks) EXPECT_FALSE(as_fsdp(*block).is_unsharded());
      EXPECT_FALSE(as_fsdp(*net).is_unsharded());
      if (GetParam() > 1) {
        EXPECT_EQ(allocator.alive(kWeightBytes), 0u);
      }
      if (iteration == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        after_first = allocator.live_bytes();
      }
      EXPECT_LE(settled_bytes(allocator, after_first), after_first) << "iteration " << iteration;
    }
  });
}

TEST_P(Memory, NothingIsLeftWhenTheModuleIsGone) {
  on_ranks(GetParam(), [&](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    {
      Net warm_up = sharded_net();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const size_t before = allocator.live_bytes();
    {
      Net net = sharded_net();
      net->loss(torch::randint(0, 11, {2, 3}), torch::randint(0, 11, {2, 3})).backward();
    }
    EXPECT_LE(settled_bytes(allocator, before), before);
  });
}

}  // namespace
}  // namespace fsdp2::testing
