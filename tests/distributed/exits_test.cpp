// Ways to end, or to go on, that leave nobody waiting and nothing half done.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/shared_outcomes.h"
#include "support/twins.h"

#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <sys/wait.h>

namespace fsdp2::testing::exits {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

Tensor loss(TwoLinear& module, int rank) {
  torch::manual_seed(100 + rank);
  return module->forward(torch::randn({3, 5})).pow(2).sum();
}

class Exits : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Exits, ::testing::Values(1, 2, 3));

TEST_P(Exits, ARefusedWrapChangesNothingAndCanBeRepeated) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    {
      const Tensor alias = twins.sharded->b->weight.detach().t();
      EXPECT_THAT(error_of([&] { fully_shard(twins.sharded); }), HasSubstr("b.weight"));
      EXPECT_FALSE(is_fsdp(*twins.sharded));
      for (const Tensor& parameter : twins.sharded->parameters()) {
        EXPECT_FALSE(is_dtensor(parameter));
      }
    }
    fully_shard(twins.sharded);
    twins.backward(loss);
    twins.expect_same(rounding_bound());
  });
}

TEST_P(Exits, SeveralModelsAndMeshesSideBySide) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> first, second;
    TwoLinear alone;
    copy_values(*alone, *first.plain);
    wrap_layers(first.sharded, true);
    fully_shard(second.sharded);
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {get_world_size(), 1}, {"all", "one"})["one"];
    fully_shard(alone, options);
    for (int step = 0; step < 2; ++step) {
      first.backward(loss);
      loss(alone, rank).backward();
      second.backward([](TwoLinear& m, int r) { return loss(m, r) + 2 * loss(m, r + 5); });
    }
    first.expect_same(1e-4);
    second.expect_same(1e-4);
    TwoLinear plain;
    copy_values(*plain, *first.plain);
    for (int step = 0; step < 2; ++step) loss(plain, rank).backward();
    expect_same_module(*alone, *plain, 0);
  });
}

TEST_P(Exits, ProcessGroupDestroyedBeforeTheModel) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    wrap_layers(module, true);
    loss(module, 0).backward();
    destroy_process_group();
    torch::optim::SGD(module->parameters(), 0.1).step();  // needs nobody
    Tensor saved = DTensor(module->parameters()[0]).to_local().clone();
    module = nullptr;
    EXPECT_TRUE(saved.isfinite().all().item<bool>());
  });
}

TEST(ExitsOfOne, AForkedProcessMustNotUseItsParentsConnections) {
  on_ranks(2, [](int) {
    TwoLinear module;
    fully_shard(module);
    loss(module, 0).backward();
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const std::string error = error_of([&] { loss(module, 0); });
      const bool named = error.find("forked") != std::string::npos;
      if (!named) std::cerr << "error was: " << error << std::endl;
      _exit(named ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    loss(module, 0).backward();  // the parent goes on
  });
}

/// An exception on one rank: it gets it, the other gets an error in time.
void expect_error_on_both(const std::function<void(TwoLinear&, int rank)>& step,
                          const std::string& what) {
  SharedOutcomes outcomes(2);
  on_ranks(
      2,
      [&](int rank) {
        TwoLinear module;
        wrap_layers(module, true);
        const std::string error = error_of([&] {
          for (int i = 0; i < 2; ++i) step(module, rank);
        });
        const bool right = error.find(rank == 0 ? "mine" : "'a.") != std::string::npos ||
                           error.find(rank == 0 ? "mine" : "'b.") != std::string::npos;
        outcomes.set(rank, right ? 1 : 0);
        if (!right) std::cerr << what << ", rank " << rank << ": " << error << std::endl;
        SharedOutcomes::leave();
      },
      std::chrono::seconds(6));
  EXPECT_EQ(outcomes.count(1), 2) << what;
}

struct Throw : torch::autograd::Function<Throw> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("mine");
  }
};

TEST(ExitsOfOne, AnExceptionAnywhereOnOneRank) {
  expect_error_on_both(
      [](TwoLinear& m, int rank) {
        Tensor h = m->a(torch::ones({3, 5}));
        if (rank == 0) throw std::runtime_error("mine");
        m->b(h).sum().backward();
      },
      "in forward");
  expect_error_on_both(
      [](TwoLinear& m, int rank) {
        Tensor h = m->a(torch::ones({3, 5}));
        if (rank == 0) h = Throw::apply(h);
        m->b(h).sum().backward();
      },
      "in backward");
  expect_error_on_both(
      [](TwoLinear& m, int rank) {
        loss(m, rank).backward();
        if (rank == 0) throw std::runtime_error("mine");
      },
      "in step");
}

/// gloo ends the process when the sizes of one collective differ; what it was is said then.
TEST(ExitsOfOne, BranchesIntoGroupsOfDifferentSizesAreNamed) {
  const std::string path = ::testing::TempDir() + "/branches." + std::to_string(getpid());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(file, 2);
    dup2(file, 1);
    setenv("FSDP2_SHARED_MEMORY", "off", 1);
    on_ranks(
        2,
        [](int rank) {
          torch::nn::Sequential module(torch::nn::Linear(500, 500), torch::nn::Linear(3, 3));
          fully_shard(module->ptr(0));
          fully_shard(module->ptr(1));
          fully_shard(module);
          if (rank == 0) module[0]->as<torch::nn::Linear>()->weight.sum();
          if (rank == 1) module[1]->as<torch::nn::Linear>()->weight.sum();
        },
        std::chrono::seconds(20));
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), AllOf(HasSubstr("fsdp2: rank 1"), HasSubstr("'1.weight, ...'"),
                                HasSubstr("different branches")));
  unlink(path.c_str());
}

/// Where memory is shared only words travel, and they have one size.
TEST(ExitsOfOne, BranchesOnOneHostAreAnErrorOnAllRanks) {
  on_ranks(2, [](int rank) {
    torch::nn::Sequential module(torch::nn::Linear(500, 500), torch::nn::Linear(3, 3));
    fully_shard(module->ptr(0));
    fully_shard(module->ptr(1));
    fully_shard(module);
    const std::string error =
        error_of([&] { module[static_cast<size_t>(rank)]->as<torch::nn::Linear>()->weight.sum(); });
    EXPECT_THAT(error, HasSubstr("ranks disagree about the all-gather"));
  });
}

}  // namespace
}  // namespace fsdp2::testing::exits
