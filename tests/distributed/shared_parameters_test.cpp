// Parameters and gradients in memory that the ranks of a host share: what one rank does never shows
// in another's numbers, however far apart they are.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <sys/wait.h>
#include <thread>

namespace fsdp2::testing::shared_parameters {
namespace {

using torch::Tensor;

Tensor loss(TwoLinear& module, int rank, int step) {
  torch::manual_seed(100 + rank + 10 * step);
  return module->forward(torch::randn({3, 5})).pow(2).mean();
}

/// The name of the mapping that an address lies in.
std::string mapping_of(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t dash = line.find('-');
    const auto from = std::stoull(line.substr(0, dash), nullptr, 16);
    const auto to = std::stoull(line.substr(dash + 1), nullptr, 16);
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (from <= at && at < to) return line;
  }
  return {};
}

void nap(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 4 * 1000));
}

class SharedParameters : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, SharedParameters, ::testing::Values(2, 3, 4));

TEST_P(SharedParameters, LieInOneMemory) {
  on_ranks(GetParam(), [](int) {
    TwoLinear module;
    fully_shard(module);
    as_fsdp(*module).unshard();
    const Tensor weight = module->a->weight;
    EXPECT_THAT(mapping_of(weight.const_data_ptr()), ::testing::HasSubstr("fsdp2:parameters"));
  });
}

TEST_P(SharedParameters, RanksThatAreFarApartTrainAsThePlainModule) {
  on_ranks(GetParam(), [](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (bool reshard : {true, false}) {
      Twins<TwoLinear> twins;
      wrap_layers(twins.sharded, reshard);
      torch::optim::SGD plain(twins.plain->parameters(), 0.1),
          ours(twins.sharded->parameters(), 0.1);
      for (int step = 0; step < 12; ++step) {
        twins.zero_grad();
        nap(random);
        twins.backward([&](TwoLinear& module, int r) {
          Tensor out = loss(module, r, step);
          if (out.requires_grad()) out.register_hook([&](const Tensor&) { nap(random); });
          return out;
        });
        twins.expect_same(rounding_bound());
        nap(random);
        plain.step();
        nap(random);
        ours.step();
      }
    }
  });
}

/// The one that is ahead writes its shards while the other still runs backward on the old ones.
TEST_P(SharedParameters, AWriteDoesNotReachARankThatStillComputes) {
  on_ranks(GetParam(), [](int rank) {
    Twins<TwoLinear> twins;
    wrap_layers(twins.sharded, false);
    as_fsdp(*twins.sharded).set_reshard_after_backward(false);
    for (int step = 0; step < 4; ++step) {
      twins.zero_grad();
      twins.backward([&](TwoLinear& module, int r) {
        Tensor out = loss(module, r, step);
        if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return out;
      });
      twins.expect_same(rounding_bound());
      torch::NoGradGuard no_grad;
      for (Tensor& parameter : twins.sharded->parameters()) {
        if (step % 2 == 0) {
          parameter.mul_(0.5);
        } else {
          DTensor(parameter).to_local().mul_(0.5);
        }
      }
      for (Tensor& parameter : twins.plain->parameters()) parameter.mul_(0.5);
    }
  });
}

TEST_P(SharedParameters, AValueThatIsWrittenPastEverythingIsReadInTheNextForward) {
  on_ranks(GetParam(), [](int) {
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 8).bias(false));
    fully_shard(linear);
    torch::NoGradGuard no_grad;
    for (int value = 1; value < 4; ++value) {
      Tensor local = DTensor(linear->parameters()[0]).to_local();
      std::fill_n(static_cast<float*>(local.data_ptr()), local.numel(), static_cast<float>(value));
      EXPECT_EQ(linear(torch::ones({1, 4})).max().item<float>(), 4.0F * static_cast<float>(value));
      as_fsdp(*linear).reshard();
    }
  });
}

/// No rank waits for ever for one that is gone.
TEST_P(SharedParameters, ARankThatDiesIsNamed) {
  const int world = GetParam();
  const std::string path =
      (std::filesystem::temp_directory_path() / ("fsdp2-dead-" + std::to_string(getpid())))
          .string();
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    InitOptions options;
    options.rank = rank;
    options.world_size = world;
    options.store = c10::make_intrusive<c10d::FileStore>(path, world);
    options.timeout = std::chrono::seconds(20);
    std::string error = "none";
    try {
      init_process_group(options);
      torch::set_num_threads(1);
      TwoLinear module;
      wrap_layers(module, true);
      for (int step = 0; step < 1000; ++step) {
        if (step == 3 && rank == world - 1) raise(SIGKILL);
        loss(module, rank, step).backward();
      }
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    const bool named = error.find("rank " + std::to_string(world - 1)) != std::string::npos;
    if (!named) std::cerr << error << std::endl;
    _exit(named ? 0 : 1);
  }
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    if (rank == world - 1) {
      EXPECT_TRUE(WIFSIGNALED(status));
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace fsdp2::testing::shared_parameters
