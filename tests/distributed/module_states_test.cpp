// Do all ranks start from one model?

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <cstdlib>

namespace fsdp2::testing::module_states {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

struct WeightImpl : torch::nn::Module {
  Tensor weight, buffer;
  explicit WeightImpl(double value) {
    weight = register_parameter("weight", torch::full({4, 2}, value));
    buffer = register_buffer("buffer", torch::full({3}, value));
  }
};
TORCH_MODULE(Weight);

TEST(ModuleStates, WithoutHelpEveryRankBringsItsOwnRows) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {4}, {"all"});
    Weight module(rank);
    EXPECT_THAT(error_of([&] { check_module_states(*module, mesh); }),
                AllOf(HasSubstr("parameter 'weight' differs along mesh dimension 'all'"),
                      HasSubstr("buffer 'buffer'"), HasSubstr("sync_module_states")));
    fully_shard(module);
    EXPECT_TRUE(torch::equal(full(module->parameters()[0]).select(1, 0),
                             torch::tensor({0.F, 1.F, 2.F, 3.F})));
  });
}

TEST(ModuleStates, SyncBeforeWrappingGivesTheFirstRanksModel) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    for (const FullyShardOptions& options :
         {FullyShardOptions{}, FullyShardOptions{.mesh = mesh}}) {
      Weight module(rank);
      sync_module_states(*module, mesh);
      check_module_states(*module, mesh);
      EXPECT_TRUE(torch::equal(module->buffer, torch::zeros({3})));
      fully_shard(module, options);
      EXPECT_TRUE(torch::equal(full(module->parameters()[0]), torch::zeros({4, 2})));
    }
  });
}

TEST(ModuleStates, AfterWrappingReplicasAreMadeEqualAndStaySo) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    Weight module(rank);
    fully_shard(module, FullyShardOptions{.mesh = mesh});
    EXPECT_THAT(error_of([&] { check_module_states(*module, mesh); }),
                AllOf(HasSubstr("parameter 'weight' differs along mesh dimension 'replicate'"),
                      Not(HasSubstr("'weight' differs along mesh dimension 'shard'"))));
    sync_module_states(*module, mesh);
    check_module_states(*module, mesh);
    torch::optim::SGD optimizer(module->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      (module->weight * (rank + 1.0)).pow(2).sum().backward();
      optimizer.step();
      check_module_states(*module, mesh);
    }
  });
}

TEST(ModuleStates, DifferentModelsAreAnErrorOnAllRanks) {
  on_ranks(3, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    torch::nn::Linear module(4, rank == 2 ? 6 : 5);
    for (const std::string& error : {error_of([&] { sync_module_states(*module, mesh); }),
                                     error_of([&] { check_module_states(*module, mesh); })}) {
      EXPECT_THAT(error,
                  AllOf(HasSubstr("rank 0 and rank 2 differ"),
                        HasSubstr("parameter 'weight' of size [5, 4]"), HasSubstr("[6, 4]")));
    }
  });
}

TEST(ModuleStates, ACollectiveThatHasJustEndedIsNoAlias) {
  on_ranks(2, [](int rank) {
    for (int i = 0; i < 200; ++i) {
      Weight module(rank);
      wait(broadcast(module->weight, 0, world_group()));
      fully_shard(module);
    }
  });
}

TEST(ModuleStates, AskedToDebugWrappingChecks) {
  on_ranks(2, [](int rank) {
    setenv("FSDP2_DEBUG", "1", 1);
    Weight module(rank);
    EXPECT_THAT(error_of([&] { fully_shard(module); }), HasSubstr("'weight' differs along"));
    EXPECT_FALSE(is_fsdp(*module));
    sync_module_states(*module, init_device_mesh("cpu", {2}));
    fully_shard(module);
  });
}

}  // namespace
}  // namespace fsdp2::testing::module_states
