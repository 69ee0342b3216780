// A backward that throws leaves nothing behind: the next step is exact.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/shared_outcomes.h"
#include "support/twins.h"

namespace fsdp2::testing::failed_backward {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("the user's own error");
  }
};

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({3, 5});
}

Tensor loss(TwoLinear& module, int rank) { return module->forward(input(rank)).pow(2).sum(); }

class FailedBackward : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FailedBackward, ::testing::Values(1, 2, 3));

/// `fail` fails on both modules; then three steps are compared.
void expect_recovery(bool apart, const std::function<Tensor(TwoLinear&, int)>& fail) {
  Twins<TwoLinear> twins;
  wrap_layers(twins.sharded, apart);
  torch::optim::AdamW plain(twins.plain->parameters(), 0.05),
      ours(twins.sharded->parameters(), 0.05);
  const double bound = get_world_size() == 1 ? 0 : 2e-5;
  for (int step = 0; step < 3; ++step) {
    for (auto* module : twins.both()) {
      EXPECT_THAT(error_of([&] { fail(*module, get_rank()).backward(); }),
                  HasSubstr("the user's own error"));
    }
    twins.zero_grad();
    twins.backward(loss);
    twins.expect_same(bound);
    plain.step();
    ours.step();
  }
}

TEST_P(FailedBackward, BetweenTwoLayers) {
  on_ranks(GetParam(), [](int) {
    for (bool apart : {false, true}) {
      expect_recovery(apart, [](TwoLinear& module, int rank) {
        return module->b(ThrowInBackward::apply(module->a(input(rank)))).sum();
      });
    }
  });
}

TEST_P(FailedBackward, BeforeAnyParameter) {
  on_ranks(GetParam(), [](int) {
    expect_recovery(true, [](TwoLinear& module, int rank) {
      return ThrowInBackward::apply(module->forward(input(rank))).sum();
    });
  });
}

TEST_P(FailedBackward, InAHookOnATensor) {
  on_ranks(GetParam(), [](int) {
    expect_recovery(true, [](TwoLinear& module, int rank) {
      Tensor hidden = module->a(input(rank));
      hidden.register_hook(
          [](Tensor) -> Tensor { throw std::runtime_error("the user's own error"); });
      return module->b(hidden).sum();
    });
  });
}

TEST_P(FailedBackward, InForward) {
  on_ranks(GetParam(), [](int) {
    expect_recovery(true, [](TwoLinear& module, int rank) -> Tensor {
      module->a(input(rank));
      throw std::runtime_error("the user's own error");
    });
  });
}

TEST(FailedBackwardOnOneRank, IsAnErrorOnTheOthersToo) {
  SharedOutcomes failed(2);
  on_ranks(
      2,
      [&](int rank) {
        TwoLinear module;
        wrap_layers(module, true);
        const std::string error = error_of([&] {
          Tensor hidden = module->a(input(rank));
          if (rank == 0) hidden = ThrowInBackward::apply(hidden);
          module->b(hidden).sum().backward();
          module->forward(input(rank)).sum().backward();
        });
        failed.set(rank, !error.empty());
        // What is left of the world cannot be torn down together.
        failed.leave();
      },
      std::chrono::seconds(8));
  EXPECT_EQ(failed.count(1), 2) << "some rank went on as if nothing had happened";
}

}  // namespace
}  // namespace fsdp2::testing::failed_backward
