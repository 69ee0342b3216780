// Memory does not grow with the number of steps. FSDP2_FUZZ_SECONDS makes it 10,000 steps.

#include "support/errors.h"
#include "support/fuzz.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <fstream>
#include <malloc.h>
#include <unistd.h>

namespace fsdp2::testing::soak {
namespace {

using torch::Tensor;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kOwnMalloc = false;
#else
constexpr bool kOwnMalloc = true;
#endif

/// Bytes that malloc has given out, mapped ones included.
int64_t allocated() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}
int64_t resident() {
  int64_t total = 0, pages = 0;
  std::ifstream("/proc/self/statm") >> total >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

/// c10d keeps a log of the last 2,000 collectives.
void fill_log() {
  const Tensor word = torch::zeros({1});
  for (int i = 0; i < 2200; ++i) wait(all_reduce(word, ReduceOp::kSum, world_group()));
}

/// Training with all that users do between steps, failures included.
void step(TwoLinear& module, torch::optim::Optimizer& optimizer, int number) {
  const Tensor x = torch::ones({3, 5});
  optimizer.zero_grad();
  if (number % 7 == 0) {
    torch::NoGradGuard no_grad;
    module->forward(x);
  }
  if (number % 11 == 0) {
    Tensor loss = module->forward(x).sum();
    loss.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("mine"); });
    EXPECT_NE(error_of([&] { loss.backward(); }), "");
  }
  if (number % 13 == 0) {
    as_fsdp(*module->a).unshard();
    module->a->weight.norm().item<float>();
    as_fsdp(*module->a).reshard();
  }
  module->forward(module->forward(x)).pow(2).sum().backward();
  torch::nn::utils::clip_grad_norm_(module->parameters(), 1.0);
  optimizer.step();
}

class Soak : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Soak, ::testing::Values(1, 2));

TEST_P(Soak, MemoryIsSteady) {
  if (!kOwnMalloc) GTEST_SKIP() << "the sanitizer keeps what is freed";
  const int steps = fuzz_time().count() > 0 ? 10000 : 300;
  on_ranks(
      GetParam(),
      [&](int) {
        TwoLinear module;
        wrap_layers(module, true);
        torch::optim::AdamW optimizer(module->parameters());
        fill_log();
        for (int i = 0; i < 50; ++i) step(module, optimizer, i);
        const int64_t before = allocated(), resident_before = resident();
        for (int i = 0; i < steps; ++i) step(module, optimizer, i);
        // Less than a byte a step of what is kept; the arenas of threads that come and go differ.
        EXPECT_LT(allocated() - before, 64 * 1024);
        EXPECT_LT(resident() - resident_before, 4 << 20);
      },
      std::chrono::seconds(fuzz_time().count() > 0 ? 170 : 60));
}

TEST(SoakOfOne, WrappingAndDroppingModulesLeavesNothing) {
  if (!kOwnMalloc) GTEST_SKIP() << "the sanitizer keeps what is freed";
  on_ranks(2, [&](int) {
    const auto once = [] {
      TwoLinear module;
      wrap_layers(module, true);
      torch::optim::SGD optimizer(module->parameters(), 0.1);
      module->forward(torch::ones({3, 5})).sum().backward();
      optimizer.step();
    };
    fill_log();
    for (int i = 0; i < 20; ++i) once();
    const int64_t before = allocated();
    for (int i = 0; i < 100; ++i) once();
    EXPECT_LT(allocated() - before, 64 * 1024);
  });
}

}  // namespace
}  // namespace fsdp2::testing::soak
