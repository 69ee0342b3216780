// Accumulating over micro-batches, with and without communication between them.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::gradient_accumulation {
namespace {

using torch::Tensor;

class GradientAccumulation : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, GradientAccumulation, ::testing::Values(1, 2, 3, 4));

Tensor loss(TwoLinear& module, int rank, int micro) {
  torch::manual_seed(100 + rank + 10 * micro);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

TEST_P(GradientAccumulation, WithoutSyncReducesOnceAndTheSameSum) {
  on_ranks(GetParam(), [](int) {
    for (bool reshard_after_backward : {true, false}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, true);
      FSDPModule controls = as_fsdp(*twins.sharded);
      controls.set_reshard_after_backward(reshard_after_backward);
      torch::optim::SGD plain(twins.plain->parameters(), 0.1),
          ours(twins.sharded->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        twins.zero_grad();
        for (int micro = 0; micro < 3; ++micro) {
          controls.set_requires_gradient_sync(micro == 2);
          reset_collective_counts();
          twins.backward([&](TwoLinear& m, int rank) { return loss(m, rank, micro); });
          const bool sends = get_world_size() > 1 && micro == 2;
          EXPECT_EQ(collective_counts().reduce_scatters, sends ? 2 : 0);
          EXPECT_EQ(twins.sharded->parameters()[0].grad().defined(), micro == 2);
          EXPECT_EQ(as_fsdp(*twins.sharded->b).is_unsharded(), !reshard_after_backward);
        }
        twins.expect_same(rounding_bound());
        plain.step();
        ours.step();
      }
      twins.expect_same(rounding_bound());
    }
  });
}

TEST_P(GradientAccumulation, AGroupUsedInAnEarlierMicroBatchOnlyIsReducedToo) {
  on_ranks(GetParam(), [](int) {
    for (bool a_first : {true, false}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, true);
      FSDPModule controls = as_fsdp(*twins.sharded);
      const auto part = [](TwoLinear& m, int rank, bool a) {
        return (a ? m->a : m->b)(torch::full({3, 5}, 1.0 + rank)).pow(2).mean();
      };
      controls.set_requires_gradient_sync(false);
      twins.backward([&](TwoLinear& m, int rank) { return part(m, rank, a_first); });
      controls.set_requires_gradient_sync(true);
      twins.backward([&](TwoLinear& m, int rank) { return part(m, rank, !a_first); });
      twins.expect_same(rounding_bound());
    }
  });
}

TEST_P(GradientAccumulation, OneGroupMayWaitWhileAnotherDoesNot) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    as_fsdp(*twins.sharded->a).set_requires_gradient_sync(false);
    twins.backward([&](TwoLinear& m, int rank) { return loss(m, rank, 0); });
    auto parameters = twins.sharded->named_parameters();
    EXPECT_FALSE(parameters["a.weight"].grad().defined());
    EXPECT_TRUE(parameters["b.weight"].grad().defined());
    as_fsdp(*twins.sharded->a).set_requires_gradient_sync(true);
    twins.backward([&](TwoLinear& m, int rank) { return loss(m, rank, 1); });
    twins.expect_same(rounding_bound());
  });
}

TEST_P(GradientAccumulation, AFailedBackwardDropsWhatWasAddedUp) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    FSDPModule controls = as_fsdp(*twins.sharded);
    controls.set_requires_gradient_sync(false);
    loss(twins.sharded, get_rank(), 0).backward();
    Tensor hidden = twins.sharded->a(torch::ones({3, 5}));
    hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
    EXPECT_NE(error_of([&] { twins.sharded->b(hidden).sum().backward(); }), "");
    controls.set_requires_gradient_sync(true);
    twins.backward([&](TwoLinear& m, int rank) { return loss(m, rank, 1); });
    twins.expect_same(rounding_bound());
  });
}

}  // namespace
}  // namespace fsdp2::testing::gradient_accumulation
