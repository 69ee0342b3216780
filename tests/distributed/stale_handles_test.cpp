// Handles of parameters taken before fully_shard: an optimizer or a clip built on them would train
// nothing. It must say so, and must not disturb who uses the shards.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::stale_handles {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class StaleHandles : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, StaleHandles, ::testing::Values(1, 2, 3));

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

std::vector<Make> optimizers() {
  using namespace torch::optim;
  return {
      [](auto& p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); },
      [](auto& p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9)); },
      [](auto& p) { return std::make_unique<Adam>(p); },
      [](auto& p) { return std::make_unique<AdamW>(p); },
      [](auto& p) { return std::make_unique<RMSprop>(p); },
      [](auto& p) { return std::make_unique<Adagrad>(p); },
  };
}

constexpr const char* kRemedy = "parameters() as they are after fully_shard";

/// It reads the gradient, or writes the member, whichever comes first.
auto is_refusal() {
  return ::testing::AnyOf(HasSubstr(kRemedy), HasSubstr("Write to the entry of parameters()"));
}

TEST_P(StaleHandles, StepIsAnErrorAndChangesNothing) {
  on_ranks(GetParam(), [](int) {
    for (const Make& make : optimizers()) {
      for (bool apart : {false, true}) {
        Twins<TwoLinear> twins;
        auto stale = make(twins.sharded->parameters());
        wrap_layers(twins.sharded, apart);
        const Tensor x = torch::randn({2, 5});
        for (int step = 0; step < 2; ++step) {
          stale->zero_grad();
          twins.sharded->forward(x).sum().backward();
          EXPECT_THAT(error_of([&] { stale->step(); }), is_refusal());
        }
        twins.expect_same(0, /*gradients=*/false);
      }
    }
  });
}

TEST_P(StaleHandles, ClippingIsAnError) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    const std::vector<Tensor> stale = module->parameters();
    wrap_layers(module, true);
    module->forward(torch::randn({2, 5})).sum().backward();
    EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_norm_(stale, 1.0); }),
                HasSubstr(kRemedy));
    EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_value_(stale, 1e-9); }),
                HasSubstr(kRemedy));
  });
}

TEST_P(StaleHandles, DoNotDisturbGradients) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    torch::optim::SGD stale(twins.sharded->parameters(), 0.1);
    wrap_layers(twins.sharded, true);
    const Tensor x = torch::randn({3, 5});
    for (auto* module : twins.both()) {
      Tensor first = (*module)->forward(x).pow(2).sum(), second = (*module)->forward(2 * x).sum();
      first.backward();
      second.backward();
      stale.zero_grad();
      (*module)->forward(x).sum().backward();
    }
    twins.expect_same(rounding_bound());
  });
}

}  // namespace
}  // namespace fsdp2::testing::stale_handles
