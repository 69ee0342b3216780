// Checkpoints in a bucket of a server on loopback that checks signatures.

#include "checkpoint/storage.h"
#include "support/command.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/shards.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <signal.h>
#include <sys/wait.h>
#include <thread>

namespace fsdp2::s3_test {
namespace {

using dcp::StateDict;
using fsdp2::testing::Command;
using fsdp2::testing::error_of;
using fsdp2::testing::on_ranks;
using fsdp2::testing::sharded;
using fsdp2::testing::test_variable;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class S3 : public ::testing::Test {
 protected:
  void SetUp() override { start({}); }
  void start(std::vector<std::string> options) {
    if (error_of([] { files::s3_storage(); }) != "") GTEST_SKIP() << "built without S3";
    const std::string python = test_variable("FSDP2_PYTHON");
    if (python.empty()) GTEST_SKIP() << "there is no Python for the server";
    options.insert(options.begin(), {python, FSDP2_S3_SERVER});
    server_.emplace(options);
    server_->wait_for_output("}\n", std::chrono::seconds(60));
    const auto variables = nlohmann::json::parse(server_->output());
    if (variables.contains("skipped")) GTEST_SKIP() << variables["skipped"];
    for (const auto& [name, value] : variables.items()) {
      setenv(name.c_str(), value.get<std::string>().c_str(), 1);
    }
  }

  std::optional<Command> server_;
};

std::vector<std::string> names_in(const std::string& folder) {
  return files::storage_of(folder).list(folder);
}

torch::Tensor values(double first) { return torch::arange(10'007) + first; }

void expect_values(const torch::Tensor& tensor, double first) {
  EXPECT_TRUE(torch::equal(DTensor(tensor).full_tensor(), values(first)));
}

TEST_F(S3, LoadsOnAnyNumberOfRanksWhatAnotherSaved) {
  const std::string path = "s3://runs/a b/step_1";
  on_ranks(2, [&](int) {
    dcp::save({{"w", sharded(values(1))}, {"epoch", 3}}, path);
    dcp::async_save({{"w", sharded(values(2))}, {"epoch", 4}}, path).wait();
    dcp::finish_async_saves();
  });
  EXPECT_EQ(names_in(path).size(), 4U) << "two data files, checksums, metadata";
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](int) {
      StateDict state = {{"w", sharded(torch::zeros({10'007}))}, {"epoch", 0}};
      dcp::load(state, path, {.verify = true});
      expect_values(state["w"].to_tensor(), 2);
      EXPECT_EQ(state["epoch"].to_int(), 4);
    });
  }
  EXPECT_TRUE(torch::equal(dcp::load_one(path + "/", "w").to_tensor(), values(2)));
  const dcp::VerifyReport report = dcp::verify(path);
  EXPECT_TRUE(report.has_checksums);
  EXPECT_THAT(report.problems, IsEmpty());
  EXPECT_THAT(names_in("s3://runs"), ElementsAre("a b"));

  files::storage_of(path).remove(path + "/__0_1.distcp");
  EXPECT_THAT(error_of([&] { dcp::load_one(path, "w"); }),
              AllOf(HasSubstr(path + "/__0_1.distcp"), HasSubstr("is missing")));
  EXPECT_FALSE(dcp::verify(path).problems.empty());
}

TEST_F(S3, LargeFilesGoInPartsAndUnfinishedOnesCanBeRemoved) {
  const std::string path = "s3://runs/large";
  const torch::Tensor large = torch::arange(int64_t{20} * 1024 * 1024);  // 160 MiB
  dcp::save({{"w", large}, {"small", 1}}, path, {.threads = 1});
  EXPECT_TRUE(torch::equal(dcp::load_one(path, "w").to_tensor(), large));

  const files::Storage& storage = files::storage_of(path);
  const std::string bytes(size_t{70} * 1024 * 1024, 'x');
  storage.create(path + "/__0_7.distcp")->write(bytes.data(), bytes.size());  // fails before sync()
  EXPECT_THAT(names_in(path), Not(::testing::Contains("__0_7.distcp")));

  const pid_t child = fork();
  if (child == 0) {
    const auto file = storage.create(path + "/__0_8.distcp");
    file->write(bytes.data(), bytes.size());
    pause();
  }
  const auto seen = [&] {
    const auto names = names_in(path);
    return std::count(names.begin(), names.end(), "__0_8.distcp") > 0;
  };
  for (int i = 0; i < 600 && !seen(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  ASSERT_TRUE(seen());
  EXPECT_EQ(dcp::load_one(path, "small").to_int(), 1);
  dcp::save({{"small", 2}}, path);
  EXPECT_FALSE(seen()) << "the next save removes what the killed one left";
  EXPECT_EQ(names_in(path).size(), 3U);
}

/// Saves 1, 2, 3, ... over one another until it is killed.
[[noreturn]] void save_forever(const std::string& path) {
  for (int value = 1;; ++value) {
    StateDict state = {{"value", value}};
    for (int i = 0; i < 5; ++i) {
      state["w" + std::to_string(i)] = torch::full({2000}, static_cast<double>(value));
    }
    dcp::save(state, path, {.threads = 2});
  }
}

TEST_F(S3, WheneverItIsKilledTheNewestCheckpointLoadsWhole) {
  const std::string path = "s3://runs/killed";
  dcp::save({{"value", 0}}, path);
  int64_t newest = 0;
  for (int round = 0; round < 8; ++round) {
    const pid_t child = fork();
    if (child == 0) save_forever(path);
    std::this_thread::sleep_for(std::chrono::milliseconds(37 * (round + 1)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const StateDict state = dcp::load_everything(path);
    const int64_t value = state.at("value").to_int();
    newest = std::max(newest, value);
    for (int i = 0; value > 0 && i < 5; ++i) {
      const torch::Tensor w = state.at("w" + std::to_string(i)).to_tensor();
      ASSERT_TRUE(torch::equal(w, torch::full({2000}, static_cast<double>(value)))) << round;
    }
    EXPECT_THAT(dcp::verify(path).problems, IsEmpty());
  }
  EXPECT_GT(newest, 1) << "no save has got through";
  dcp::save({{"value", 0}}, path);
  EXPECT_EQ(names_in(path).size(), 3U) << "what the killed saves left is gone";
}

TEST_F(S3, TheCheckpointsOfARun) {
  on_ranks(2, [&](int rank) {
    const dcp::Checkpoints checkpoints("s3://runs/run", 2);
    EXPECT_EQ(checkpoints.latest(), std::nullopt);
    for (const int64_t step : {5, 10, 15}) {
      checkpoints.save({{"w", sharded(values(static_cast<double>(step)))}}, step);
    }
    EXPECT_EQ(checkpoints.steps(), (std::vector<int64_t>{10, 15}));
    EXPECT_EQ(checkpoints.latest(), "s3://runs/run/step_15");
    StateDict state = {{"w", sharded(torch::zeros({10'007}))}};
    dcp::load(state, "s3://runs/run/latest");
    expect_values(state["w"].to_tensor(), 15);
    wait(barrier(world_group()));
    if (rank != 0) return;
    files::storage_of("s3://").remove("s3://runs/run/step_15/.metadata");
    EXPECT_EQ(checkpoints.latest(), "s3://runs/run/step_10");
    EXPECT_THAT(checkpoints.prune(1), ElementsAre("s3://runs/run/step_15"));
    EXPECT_THAT(names_in("s3://runs/run"), ElementsAre("latest", "step_10"));
  });
}

TEST_F(S3, ListsMoreThanAnAnswerHolds) {
  const files::Storage& storage = files::s3_storage();
  // The server is told to put 20 into an answer.
  for (int i = 0; i < 50; ++i) storage.replace("s3://runs/many/" + std::to_string(i), "x");
  EXPECT_EQ(names_in("s3://runs/many").size(), 50U);
  storage.remove_folder("s3://runs/many");
  EXPECT_THAT(names_in("s3://runs/many"), IsEmpty());
  EXPECT_THAT(error_of([&] { storage.remove_folder("s3://runs/"); }), HasSubstr("whole bucket"));
}

TEST_F(S3, SaysWhatTheServerSays) {
  const std::string path = "s3://runs/errors";
  EXPECT_THAT(error_of([&] { dcp::read_metadata(path); }),
              AllOf(HasSubstr("there is no checkpoint"), HasSubstr(path)));
  EXPECT_THAT(error_of([&] { dcp::save({{"a", 1}}, "s3://other/errors"); }),
              AllOf(HasSubstr("s3://other/"), HasSubstr("404"), HasSubstr("NoSuchBucket")));
  setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret", 1);
  EXPECT_THAT(error_of([&] { dcp::read_metadata(path); }),
              AllOf(HasSubstr("cannot read s3://runs/errors"), HasSubstr("HTTP 403"),
                    HasSubstr("SignatureDoesNotMatch"), HasSubstr("Check your"),
                    Not(HasSubstr("not-the-secret"))));
  unsetenv("AWS_SECRET_ACCESS_KEY");
  EXPECT_THAT(error_of([&] { dcp::save({{"a", 1}}, path); }), HasSubstr("AWS_SECRET_ACCESS_KEY"));
  setenv("AWS_SECRET_ACCESS_KEY", "any", 1);
  const std::string endpoint = getenv("AWS_ENDPOINT_URL");
  server_.reset();
  EXPECT_THAT(error_of([&] { dcp::read_metadata(path); }),
              AllOf(HasSubstr("cannot read s3://runs/errors"), HasSubstr("AWS_ENDPOINT_URL"),
                    HasSubstr(endpoint), HasSubstr("tried 6 times")));
}

/// A server that fails now and then.
class FlakyS3 : public S3 {
 protected:
  void SetUp() override { start({"--flaky"}); }
};

TEST_F(FlakyS3, IsAskedAgain) {
  const std::string path = "s3://runs/flaky";
  const torch::Tensor large = torch::arange(int64_t{9} * 1024 * 1024);  // 72 MiB: two parts
  for (int i = 0; i < 2; ++i) dcp::save({{"w", large}, {"i", i}}, path);
  const StateDict state = dcp::load_everything(path);
  EXPECT_TRUE(torch::equal(state.at("w").to_tensor(), large));
  EXPECT_EQ(state.at("i").to_int(), 1);
  EXPECT_THAT(dcp::verify(path).problems, IsEmpty());
}

}  // namespace
}  // namespace fsdp2::s3_test
