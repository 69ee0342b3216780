// What is on the disk when a save is cut off, repeated, or done again by other ranks.

#include "support/command.h"
#include "support/errors.h"
#include "support/fuzz.h"
#include "support/ranks.h"
#include "support/shards.h"
#include "support/temporary_folder.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>

namespace fsdp2::durability_test {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;
using fsdp2::testing::error_of;
using fsdp2::testing::on_ranks;
using fsdp2::testing::sharded;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

TEST(Durability, AnotherNumberOfRanksLeavesNothingStale) {
  const TemporaryFolder folder;
  const std::string path = folder.path("d3");
  on_ranks(4, [&](int) { dcp::save({{"w", sharded(torch::full({6}, 3.))}}, path); });
  const auto before = files_in(path);
  on_ranks(2, [&](int) { dcp::save({{"w", sharded(torch::full({6}, 4.))}}, path); });
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](int) {
      StateDict state = {{"w", sharded(torch::zeros({6}))}};
      dcp::load(state, path, {.verify = true});
      EXPECT_TRUE(
          torch::equal(DTensor(state["w"].to_tensor()).full_tensor(), torch::full({6}, 4.)));
    });
  }
  const auto after = files_in(path);
  EXPECT_EQ(after.size(), 4U);  // two data files, checksums, metadata
  std::set<std::string> both;
  std::set_intersection(before.begin(), before.end(), after.begin(), after.end(),
                        std::inserter(both, both.end()));
  EXPECT_EQ(both, (std::set<std::string>{".metadata"})) << "a file was written over";
}

TEST(Durability, ASaveThatFailsLeavesTheOlderCheckpoint) {
  const TemporaryFolder folder;
  const std::string path = folder.path("d1");
  on_ranks(2, [&](int rank) {
    dcp::save({{"w", sharded(torch::ones({60'000}))}}, path);
    const auto before = files_in(path);
    if (rank == 1) {  // its disk is full
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{50'000, 50'000};
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    StateDict state = {{"w", sharded(torch::full({60'000}, 2.))}};
    EXPECT_THAT(error_of([&] { dcp::save(state, path); }),
                AllOf(HasSubstr(path), HasSubstr("rank 1"), HasSubstr("cannot write"),
                      HasSubstr("__1_1.distcp"), HasSubstr("too large")));
    wait(barrier(world_group()));
    EXPECT_EQ(files_in(path), before);
    dcp::load(state, path, {.verify = true});
    EXPECT_TRUE(torch::equal(DTensor(state["w"].to_tensor()).full_tensor(), torch::ones({60'000})));
  });
}

/// Saves 1, 2, 3, ... over one another until it is killed.
[[noreturn]] void save_forever(const std::string& path) {
  for (int value = 1;; ++value) {
    StateDict state;
    for (int i = 0; i < 20; ++i) {
      state["w" + std::to_string(i)] = torch::full({2000}, static_cast<double>(value));
    }
    state["value"] = value;
    dcp::save(state, path);
  }
}

TEST(Durability, WheneverItIsKilledTheNewestCheckpointLoadsWhole) {
  const TemporaryFolder folder;
  const std::string path = folder.path("d1");
  fsdp2::testing::Dice dice(fsdp2::testing::first_seed());
  int64_t newest = 0;
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) save_forever(path);
    // At least one save is complete before the first kill.
    while (newest == 0 && !fs::exists(fs::path(path) / ".metadata")) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(dice.upto(30'000)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);

    const StateDict state = dcp::load_everything(path);
    const int64_t value = state.at("value").to_int();
    newest = std::max(newest, value);
    for (int i = 0; i < 20; ++i) {
      const torch::Tensor w = state.at("w" + std::to_string(i)).to_tensor();
      ASSERT_TRUE(torch::equal(w, torch::full({2000}, static_cast<double>(value)))) << round;
    }
    EXPECT_TRUE(dcp::verify(path).problems.empty());
  }
  dcp::save({{"value", 0}}, path);
  EXPECT_EQ(files_in(path).size(), 3U) << "what the killed saves left is gone";
}

TEST(Durability, ADiskThatIsNotSharedIsSeen) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int rank) {
    // Two folders stand for one path on the disks of two hosts.
    const std::string path = folder.path(rank == 0 ? "a" : "b");
    StateDict state = {{"w", sharded(torch::ones({6}))}};
    EXPECT_THAT(error_of([&] { dcp::save(state, path); }),
                AllOf(HasSubstr("rank 1 on host"), HasSubstr("does not see it"),
                      HasSubstr("a disk that all hosts share")));
    EXPECT_FALSE(fs::exists(fs::path(path) / ".metadata"));
  });
}

TEST(Durability, ResumingTakesTheNewestCompleteCheckpoint) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int rank) {
    const dcp::Checkpoints checkpoints(folder.path(), 2);
    EXPECT_EQ(checkpoints.latest(), std::nullopt);
    for (const int64_t step : {5, 10, 15}) {
      checkpoints.save({{"w", sharded(torch::full({6}, static_cast<double>(step)))}}, step);
    }
    EXPECT_EQ(checkpoints.steps(), (std::vector<int64_t>{10, 15}));
    EXPECT_EQ(checkpoints.latest(), checkpoints.folder_of(15));
    wait(barrier(world_group()));
    if (rank == 0) fs::remove(fs::path(checkpoints.folder_of(15)) / ".metadata");
    wait(barrier(world_group()));
    EXPECT_EQ(checkpoints.latest(), checkpoints.folder_of(10));
    StateDict state = {{"w", sharded(torch::zeros({6}))}};
    dcp::load(state, *checkpoints.latest());
    EXPECT_TRUE(torch::equal(DTensor(state["w"].to_tensor()).full_tensor(), torch::full({6}, 10.)));
    checkpoints.async_save(state, 20).wait();
    EXPECT_EQ(checkpoints.latest(), checkpoints.folder_of(20));
    if (rank == 0) {
      EXPECT_EQ(checkpoints.prune(1).size(), 2U);  // 10, and what is left of 15
      EXPECT_EQ(checkpoints.steps(), (std::vector<int64_t>{20}));
    }
    dcp::finish_async_saves();
  });
}

TEST(Durability, AnAsyncSaveHoldsTheValuesOfTheCall) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int) {
    const torch::Tensor w = sharded(torch::ones({1000}));
    std::vector<dcp::AsyncSave> saves;
    for (int i = 1; i <= 3; ++i) {
      saves.push_back(dcp::async_save({{"w", w}, {"i", i}}, folder.path(std::to_string(i))));
      torch::NoGradGuard no_grad;
      w.add_(1);
    }
    for (const auto& save : saves) save.wait();
    for (int i = 1; i <= 3; ++i) {
      StateDict state = {{"w", sharded(torch::zeros({1000}))}, {"i", 0}};
      dcp::load(state, folder.path(std::to_string(i)));
      EXPECT_EQ(state["i"].to_int(), i);
      EXPECT_TRUE(torch::equal(DTensor(state["w"].to_tensor()).full_tensor(),
                               torch::full({1000}, static_cast<double>(i))));
    }
    dcp::finish_async_saves();
  });
}

TEST(Durability, AnErrorOfAnAsyncSaveIsHeardOnce) {
  const TemporaryFolder folder;
  folder.write("file", "");
  on_ranks(2, [&](int) {
    StateDict state = {{"w", sharded(torch::ones({6}))}};
    const dcp::AsyncSave waited = dcp::async_save(state, folder.path("file"));
    EXPECT_THAT(error_of([&] { waited.wait(); }), HasSubstr(folder.path("file")));
    dcp::save(state, folder.path("good"));  // it has been heard
    dcp::async_save(state, folder.path("file"));
    EXPECT_THAT(error_of([&] { dcp::save(state, folder.path("good")); }),
                HasSubstr(folder.path("file")));
    dcp::save(state, folder.path("good"));
    dcp::finish_async_saves();
  });
}

}  // namespace
}  // namespace fsdp2::durability_test
