// A world of backend "fake": one rank of many in one process, whose collectives act as if every
// rank had passed what this one passes.

#include "support/errors.h"
#include "support/fake_world.h"

#include <fsdp2/collectives.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::testing::fake_group {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FakeGroup, IsTheRankItIsTold) {
  {
    const FakeWorld world(1000, 1024);
    EXPECT_EQ(get_rank(), 1000);
    EXPECT_EQ(get_world_size(), 1024);
    EXPECT_EQ(get_device(), c10::Device(c10::kCPU));
    EXPECT_EQ(world_group()->getSize(), 1024);
  }
  const FakeWorld world(2, 3);
  EXPECT_EQ(get_rank(), 2);
}

TEST(FakeGroup, CollectivesActAsIfAllRanksPassedTheSame) {
  const FakeWorld world(1, 3);
  const torch::Tensor own = torch::tensor({1.0, 2.0, 3.0});
  torch::Tensor all = torch::zeros({9});
  wait(all_gather_single(all, own, world_group()));
  EXPECT_TRUE(all.equal(own.repeat({3})));

  torch::Tensor part = torch::zeros({3});
  const torch::Tensor whole = torch::arange(9.0);
  wait(reduce_scatter_single(part, whole, ReduceOp::kSum, world_group()));
  EXPECT_TRUE(part.equal(torch::tensor({9.0, 12.0, 15.0})));
  wait(reduce_scatter_single(part, whole, ReduceOp::kAvg, world_group()));
  EXPECT_TRUE(part.equal(torch::tensor({3.0, 4.0, 5.0})));

  const std::pair<ReduceOp, float> reduced[] = {{ReduceOp::kSum, 6},
                                                {ReduceOp::kAvg, 2},
                                                {ReduceOp::kMax, 2},
                                                {ReduceOp::kMin, 2},
                                                {ReduceOp::kProduct, 8}};
  for (const auto& [op, expected] : reduced) {
    torch::Tensor value = torch::full({2}, 2.0);
    wait(all_reduce(value, op, world_group()));
    EXPECT_TRUE(value.equal(torch::full({2}, expected))) << static_cast<int>(op);
  }

  torch::Tensor kept = own.clone();
  wait(broadcast(kept, 0, world_group()));
  EXPECT_TRUE(kept.equal(own));
  torch::Tensor received = torch::zeros({2});
  wait(scatter(received, torch::arange(6.0), 1, world_group()));
  EXPECT_TRUE(received.equal(torch::tensor({2.0, 3.0})));
  wait(all_to_all_single(all, torch::arange(9.0), {3, 3, 3}, {3, 3, 3}, world_group()));
  EXPECT_TRUE(all.equal(torch::tensor({3.0, 4.0, 5.0}).repeat({3})));
  wait(barrier(world_group()));
  EXPECT_EQ(all_gather_bytes("abc", world_group()), std::vector<std::string>(3, "abc"));
}

TEST(FakeGroup, MakesMeshesAndGroupsOfAThousandRanks) {
  const FakeWorld world(777, 1024);
  const DeviceMesh mesh = init_device_mesh("meta", {8, 128}, {"replicate", "shard"});
  EXPECT_EQ(mesh.device(), c10::Device(c10::kMeta));
  EXPECT_EQ(mesh.get_local_rank("replicate"), 6);
  EXPECT_EQ(mesh.get_local_rank("shard"), 9);
  EXPECT_EQ(mesh.get_group("shard")->getSize(), 128);
  EXPECT_EQ(mesh.flatten().size(), 1024);
  EXPECT_EQ(new_group({1, 2, 777})->getRank(), 2);
  EXPECT_FALSE(new_group({1, 2, 3}));
}

TEST(FakeGroup, NeedsARankAndAWorldSize) {
  InitOptions options;
  options.backend = "fake";
  EXPECT_THAT(error_of([&] { init_process_group(options); }),
              AllOf(HasSubstr("fake"), HasSubstr("world_size")));
  EXPECT_THAT(error_of([] { const FakeWorld world(4, 4); }), HasSubstr("outside 0 to 3"));
  EXPECT_FALSE(is_initialized());
}

TEST(FakeGroup, MetaIsForFakeWorldsOnly) {
  init_process_group();
  EXPECT_THAT(error_of([] { init_device_mesh("meta", {1}); }), HasSubstr("no backend"));
  destroy_process_group();
}

}  // namespace
}  // namespace fsdp2::testing::fake_group
