// pytorch#162338: gloo has no average, and used to return the sum. 3 rows do not divide by the
// ranks either.

#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::gloo_average {
namespace {

using torch::Tensor;

TEST(GlooAverage, GradientsAreTheMeanNotTheSum) {
  for (int world : {2, 4}) {
    on_ranks(world, [](int rank) {
      for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
        for (bool reshard : {false, true}) {
          FullyShardOptions options;
          options.reshard_after_forward = reshard;
          torch::nn::Linear module(torch::nn::LinearOptions(4, 3).bias(false));
          module->to(dtype);
          fully_shard(module, options);
          const Tensor x = torch::full({3, 4}, rank + 1.0, dtype);
          module(x).sum().backward();
          const Tensor expected = torch::full({3, 4}, get_world_size() == 2 ? 4.5 : 7.5);
          EXPECT_EQ(module->parameters()[0].grad().scalar_type(), dtype);
          EXPECT_EQ(difference(full(module->parameters()[0].grad()), expected), 0);
          module(x).sum().backward();
          EXPECT_EQ(difference(full(module->parameters()[0].grad()), 2 * expected), 0);
        }
      }
    });
  }
}

TEST(GlooAverage, OfPartialTensors) {
  for (int world : {2, 4}) {
    on_ranks(world, [](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {get_world_size()});
      const double mean = (get_world_size() + 1) / 2.0;
      for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
        const Tensor local = torch::full({3, 4}, rank + 1.0, dtype);
        for (const Placement& to : {Replicate(), Shard(0)}) {
          DTensor partial = DTensor::from_local(local, mesh, {Partial("avg")}, {{3, 4}});
          EXPECT_EQ(difference(partial.redistribute({to}).full_tensor(), torch::full({3, 4}, mean)),
                    0);
        }
        Tensor reduced = local.clone();
        wait(all_reduce(reduced, ReduceOp::kAvg, world_group()));
        EXPECT_EQ(difference(reduced, torch::full({3, 4}, mean)), 0);
      }
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing::gloo_average
