// A 2-D mesh: replicas over its first dimension, shards over its second.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::hsdp {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

using Shape = std::vector<int64_t>;
class Hsdp : public ::testing::TestWithParam<Shape> {
 protected:
  int world() const { return static_cast<int>(GetParam()[0] * GetParam()[1]); }
};
INSTANTIATE_TEST_SUITE_P(Meshes, Hsdp,
                         ::testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{2, 1}, Shape{1, 3},
                                           Shape{3, 1}, Shape{2, 2}));

FullyShardOptions over(const Shape& shape) {
  FullyShardOptions options;
  options.mesh = init_device_mesh("cpu", shape, {"replicate", "shard"});
  return options;
}

Tensor loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

TEST_P(Hsdp, TrainsAsThePlainModule) {
  on_ranks(world(), [&](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, over(GetParam()));
    const DTensor weight(twins.sharded->parameters()[0]);
    EXPECT_EQ(weight.placements(), (Placements{Replicate(), Shard(0)}));
    EXPECT_EQ(weight.to_local().size(0),
              chunk_of(5, GetParam()[1], get_rank() % GetParam()[1]).length);
    torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
        ours(twins.sharded->parameters(), 0.01);
    for (int step = 0; step < 5; ++step) {
      twins.zero_grad();
      twins.backward(loss);
      const double expected = torch::nn::utils::clip_grad_norm_(twins.plain->parameters(), 0.1);
      const double norm = torch::nn::utils::clip_grad_norm_(twins.sharded->parameters(), 0.1);
      EXPECT_NEAR(norm, expected, 1e-5 * expected);
      twins.expect_same(world() == 1 ? 0 : 1e-5);
      plain.step();
      ours.step();
    }
    twins.expect_same(world() == 1 ? 0 : 1e-5);
  });
}

TEST_P(Hsdp, AParameterThatOneRankUsesGetsTheMean) {
  on_ranks(world(), [&](int) {
    Twins<TwoLinear> twins;
    fully_shard(twins.sharded, over(GetParam()));
    twins.backward([](TwoLinear& m, int rank) {
      Tensor h = m->a(torch::ones({3, 5}));
      return (rank == 0 ? m->b(h) : h).sum();
    });
    twins.expect_same(1e-5);
  });
}

TEST_P(Hsdp, EachStepSumsOverReplicasOnce) {
  on_ranks(world(), [&](int rank) {
    TwoLinear module;
    wrap_layers(module, over(GetParam()));
    loss(module, rank).backward();
    reset_collective_counts();
    loss(module, rank).backward();
    EXPECT_EQ(collective_counts().all_reduces, GetParam()[0] > 1 ? 2 : 0);
    EXPECT_EQ(collective_counts().reduce_scatters, GetParam()[1] > 1 ? 2 : 0);
  });
}

TEST(HsdpErrors, MeshesThatSayTooLittleOrTooMuch) {
  on_ranks(2, [](int) {
    TwoLinear module;
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {2, 1});
    EXPECT_THAT(error_of([&] { fully_shard(module, options); }), HasSubstr("must name its dim"));
    options.mesh = init_device_mesh("cpu", {2, 1, 1}, {"a", "b", "c"});
    EXPECT_THAT(error_of([&] { fully_shard(module, options); }), HasSubstr("1-D, or 2-D"));
    EXPECT_FALSE(is_fsdp(*module));
  });
}

}  // namespace
}  // namespace fsdp2::testing::hsdp
