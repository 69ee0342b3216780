// Forward, optimizer step, backward: the graph saved the old weights, so backward is an error as in
// plain torch. A mere re-gather of unchanged weights is not.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::backward_after_step {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class BackwardAfterStep : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, BackwardAfterStep, ::testing::Values(1, 2));

constexpr const char* kVersion = "modified by an inplace operation";

TEST_P(BackwardAfterStep, IsTheVersionError) {
  on_ranks(GetParam(), [](int) {
    for (bool adam : {false, true}) {
      for (bool reshard : {false, true}) {
        Twins<TwoLinear> twins;
        wrap_layers(twins.sharded, true, reshard);
        for (auto* module : twins.both()) {
          std::unique_ptr<torch::optim::Optimizer> optimizer;
          if (adam) {
            optimizer = std::make_unique<torch::optim::AdamW>((*module)->parameters());
          } else {
            optimizer = std::make_unique<torch::optim::SGD>((*module)->parameters(), 0.1);
          }
          torch::manual_seed(5);
          const Tensor x = torch::randn({3, 5});
          (*module)->forward(x).sum().backward();
          Tensor loss = (*module)->forward((*module)->forward(x)).pow(2).sum();
          {
            // The frontend's optimizers write around the version counter; a user who writes in
            // place does not.
            optimizer->step();
            torch::NoGradGuard no_grad;
            (*module)->named_parameters()["b.weight"].mul_(0.5);
          }
          EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr(kVersion));
          // And on: the next step is right.
          (*module)->zero_grad();
          (*module)->forward(torch::ones({3, 5})).pow(2).sum().backward();
        }
        twins.expect_same(1e-4);
      }
    }
  });
}

TEST_P(BackwardAfterStep, ByAnOptimizerAloneIsAnErrorToo) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    wrap_layers(module, true);
    torch::optim::SGD optimizer(module->parameters(), 0.1);
    const Tensor x = torch::randn({3, 5});
    module->forward(x).sum().backward();
    Tensor loss = module->forward(module->forward(x)).pow(2).sum();
    optimizer.step();
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr(kVersion));
  });
}

TEST_P(BackwardAfterStep, AWriteToWhatTheGraphDidNotSaveIsNot) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    for (auto* module : twins.both()) {
      Tensor loss = (*module)->forward(torch::ones({3, 5})).pow(2).sum();
      {
        torch::NoGradGuard no_grad;
        (*module)->named_parameters()["a.bias"].mul_(3);
      }
      loss.backward();
    }
    twins.expect_same(rounding_bound());
  });
}

TEST_P(BackwardAfterStep, NeitherIsGatheringAgain) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, true);
    for (auto* module : twins.both()) {
      Tensor view = (*module)->a->weight.view({25}).narrow(0, 3, 10);
      Tensor loss = (*module)->forward(torch::ones({3, 5})).pow(2).sum() * view.exp().sum();
      if (module == &twins.sharded) {
        for (int i = 0; i < 3; ++i) {
          as_fsdp(*(*module)->a).reshard();
          as_fsdp(*(*module)->a).unshard();
          as_fsdp(*(*module)->b).reshard();
        }
      }
      loss.backward();
    }
    twins.expect_same(get_world_size() == 1 ? 0 : 1e-4);
  });
}

}  // namespace
}  // namespace fsdp2::testing::backward_after_step
