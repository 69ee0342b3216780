// Compute in one dtype, reduce in another, keep a third: against the same casts written by hand.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::mixed_precision {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class MixedPrecision : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, MixedPrecision, ::testing::Values(1, 2, 3, 4));

FullyShardOptions policy(torch::ScalarType param, torch::ScalarType reduce) {
  FullyShardOptions options;
  options.mp_policy.param_dtype = param;
  options.mp_policy.reduce_dtype = reduce;
  return options;
}

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

/// What the policy asks for, by hand: a low-precision copy of `master` on each rank's batch.
void backward_by_hand(TwoLinear& master, torch::ScalarType param, torch::ScalarType reduce) {
  const int world = get_world_size();
  for (int rank = 0; rank < world; ++rank) {
    TwoLinear low;
    copy_values(*low, *master);
    low->to(param);
    low->forward(input(rank).to(param)).pow(2).sum().backward();
    auto targets = master->named_parameters();
    for (const auto& item : low->named_parameters()) {
      Tensor& gradient = targets[item.key()].mutable_grad();
      const Tensor part = item.value().grad().to(reduce).to(torch::kFloat) / world;
      gradient = gradient.defined() ? gradient + part : part;
    }
  }
}

TEST_P(MixedPrecision, TrainsAsCastsByHand) {
  on_ranks(GetParam(), [](int rank) {
    for (auto reduce : {torch::kFloat, torch::kBFloat16}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, policy(torch::kBFloat16, reduce));
      EXPECT_EQ(twins.sharded->a->weight.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(twins.sharded->parameters()[0].scalar_type(), torch::kFloat);
      torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
          ours(twins.sharded->parameters(), 0.01);
      // bfloat16 sums round by their order; a step turns that into a rounding of a weight.
      const double bound = get_world_size() == 1 ? 0 : reduce == torch::kFloat ? 2e-4 : 0.2;
      for (int step = 0; step < (bound > 0.01 ? 1 : 4); ++step) {
        twins.zero_grad();
        backward_by_hand(twins.plain, torch::kBFloat16, reduce);
        Tensor out = twins.sharded->forward(input(rank));
        EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
        out.pow(2).sum().backward();
        EXPECT_EQ(twins.sharded->parameters()[0].grad().scalar_type(), torch::kFloat);
        twins.expect_same(bound);
        plain.step();
        ours.step();
      }
    }
  });
}

TEST_P(MixedPrecision, CastsWhereAnInputMeetsAParameterAndBack) {
  on_ranks(GetParam(), [](int rank) {
    torch::manual_seed(3);
    torch::nn::Linear first(5, 7), last(7, 3);
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({7}));
    torch::nn::Linear low_first(5, 7), low_last(7, 3);
    copy_values(*low_first, *first);
    copy_values(*low_last, *last);
    low_first->to(torch::kBFloat16);
    low_last->to(torch::kBFloat16);
    Tensor x = input(rank).requires_grad_(), by_hand = input(rank).requires_grad_();
    Tensor h = low_first(by_hand.to(torch::kBFloat16)).to(torch::kFloat);
    low_last(torch::layer_norm(h, {7}).to(torch::kBFloat16)).pow(2).sum().backward();
    const auto low = policy(torch::kBFloat16, torch::kFloat);
    fully_shard(first, low);
    fully_shard(norm, policy(torch::kFloat, torch::kFloat));
    fully_shard(last, low);
    last(norm(first(x))).pow(2).sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), torch::kFloat);
    EXPECT_EQ(difference(x.grad(), by_hand.grad()), 0);
  });
}

struct RootMeanSquareImpl : torch::nn::Module {
  Tensor weight = register_parameter("weight", torch::linspace(0.1, 1.7, 5));
  Tensor forward(const Tensor& x) { return torch::rms_norm(x, {5}, weight, 1e-5); }
};
TORCH_MODULE(RootMeanSquare);

TEST_P(MixedPrecision, AnOpThatComputesInAWiderDtypeInsideStillDoes) {
  on_ranks(GetParam(), [](int) {
    RootMeanSquare sharded, low;
    low->to(torch::kBFloat16);
    FullyShardOptions options = policy(torch::kBFloat16, torch::kFloat);
    for (const bool cast : {true, false}) {
      options.mp_policy.cast_forward_inputs = cast;
      if (!cast) sharded = RootMeanSquare();
      fully_shard(sharded, options);
      // The same on all ranks, so that the mean of the gradients is each.
      Tensor x = input(0).to(torch::kBFloat16).requires_grad_(), by_hand = x.detach().clone();
      by_hand.requires_grad_();
      low->zero_grad();
      const Tensor ours = sharded(x), theirs = low(by_hand);
      EXPECT_EQ(ours.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(difference(ours, theirs), 0);
      ours.pow(2).sum().backward();
      theirs.pow(2).sum().backward();
      EXPECT_EQ(difference(x.grad(), by_hand.grad()), 0);
      EXPECT_LE(difference(full(sharded->parameters()[0].grad()), low->weight.grad()), 1e-6);
    }
  });
}

TEST_P(MixedPrecision, WithoutCastsAMeetingOfDtypesIsAnError) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module;
    FullyShardOptions options = policy(torch::kBFloat16, torch::kFloat);
    options.mp_policy.cast_forward_inputs = false;
    wrap_layers(module, options);
    EXPECT_THAT(error_of([&] { module->forward(input(rank)); }),
                AllOf(HasSubstr("'a."), HasSubstr("Float"), HasSubstr("BFloat16"),
                      HasSubstr("cast_forward_inputs")));
    module->forward(input(rank).to(torch::kBFloat16)).sum().backward();
  });
}

/// Parameters used alone, so that gradients can be worked out by hand.
struct ThreeImpl : torch::nn::Module {
  Tensor p, q, unused;
  ThreeImpl() {
    p = register_parameter("p", torch::ones({4}));
    q = register_parameter("q", torch::ones({4}));
    unused = register_parameter("unused", torch::ones({4}));
  }
};
TORCH_MODULE(Three);

TEST_P(MixedPrecision, GradientsAddUpInTheDtypeOfTheReduction) {
  on_ranks(GetParam(), [](int) {
    for (bool swapped : {false, true}) {
      Three module;
      FSDPModule controls = fully_shard(module, policy(torch::kBFloat16, torch::kFloat));
      const auto large = [&] { return (module->p * 256).sum(); };
      const auto small = [&] { return (module->p * 1).sum() + (module->q * 3).sum(); };
      controls.set_requires_gradient_sync(false);
      (swapped ? small() : large()).backward();
      controls.set_requires_gradient_sync(true);
      (swapped ? large() : small()).backward();
      const auto parameters = module->named_parameters();
      EXPECT_EQ(difference(full(parameters["p"].grad()), torch::full({4}, 257.0)), 0);
      EXPECT_EQ(difference(full(parameters["q"].grad()), torch::full({4}, 3.0)), 0);
      EXPECT_EQ(parameters["p"].grad().scalar_type(), torch::kFloat);
      EXPECT_FALSE(parameters["unused"].grad().defined());
    }
  });
}

TEST_P(MixedPrecision, Float16IsDividedBeforeItOverflows) {
  on_ranks(GetParam(), [](int) {
    Three module;
    fully_shard(module, policy(torch::kHalf, torch::kHalf));
    (module->p * 30000.0).sum().backward();
    EXPECT_LE(difference(full(module->named_parameters()["p"].grad()), torch::full({4}, 30000.0)),
              32);
  });
}

TEST_P(MixedPrecision, ParametersOfSeveralDtypesInOneModule) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    for (auto* module : twins.both()) (*module)->b->to(torch::kDouble);
    fully_shard(twins.sharded);
    twins.backward([](TwoLinear& m, int r) {
      return m->b(torch::tanh(m->a(input(r))).to(torch::kDouble)).pow(2).sum();
    });
    twins.expect_same(rounding_bound());
    TwoLinear low;
    low->b->to(torch::kDouble);
    fully_shard(low, policy(torch::kBFloat16, torch::kFloat));
    low->forward(input(rank)).sum().backward();
    EXPECT_EQ(low->b->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(low->named_parameters()["b.weight"].grad().scalar_type(), torch::kDouble);
  });
}

TEST_P(MixedPrecision, RefusesWhatIsNoFloatingDtype) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    EXPECT_THAT(error_of([&] { fully_shard(module, policy(torch::kInt, torch::kFloat)); }),
                HasSubstr("must be floating"));
    EXPECT_FALSE(is_fsdp(*module));
  });
}

}  // namespace
}  // namespace fsdp2::testing::mixed_precision
