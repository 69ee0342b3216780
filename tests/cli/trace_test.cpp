// --trace of the commands that train: what a reader of the file sees of each rank.

#include "support/command.h"
#include "support/temporary_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::testing::traces {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using Json = nlohmann::json;

struct Range {
  std::string name;
  double start, end;
};

/// One rank's lanes: the ranges in each, by time.
using Lanes = std::map<std::string, std::vector<Range>>;

std::vector<Lanes> lanes_of(const Json& trace, size_t ranks) {
  std::map<std::pair<int, int>, std::string> threads;
  std::vector<Lanes> all(ranks);
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("name") == "thread_name")
      threads[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  }
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const double start = event.at("ts");
    all.at(event.at("pid").get<size_t>())[threads.at({event.at("pid"), event.at("tid")})].push_back(
        {event.at("name"), start, start + event.at("dur").get<double>()});
  }
  for (Lanes& lanes : all) {
    for (auto& [name, ranges] : lanes) {
      std::sort(ranges.begin(), ranges.end(),
                [](const Range& a, const Range& b) { return a.start < b.start; });
    }
  }
  return all;
}

/// Those whose names begin so, within `whole`.
std::vector<Range> within(const std::vector<Range>& ranges, const std::string& prefix,
                          const Range& whole) {
  std::vector<Range> found;
  for (const Range& range : ranges) {
    if (range.name.starts_with(prefix) && range.start >= whole.start && range.end <= whole.end)
      found.push_back(range);
  }
  return found;
}

std::vector<std::string> names(const std::vector<Range>& ranges) {
  std::vector<std::string> all;
  all.reserve(ranges.size());
  for (const Range& range : ranges) all.push_back(range.name);
  return all;
}

std::vector<std::string> ranks(int count, std::vector<std::string> command) {
  const std::string program = test_variable("FSDP2_BIN");
  command.insert(command.begin(), {program, "run", "-n", std::to_string(count), "--", program});
  return command;
}

std::vector<std::string> bench_step(const std::string& trace) {
  return {"bench",    "step", "--dim",       "16",   "--layers", "2",  "--heads", "2",
          "--vocab",  "31",   "--seq",       "8",    "--batch",  "1",  "--steps", "4",
          "--warmup", "2",    "--norm-impl", "fast", "--trace",  trace};
}

/// A traced step of the bench on `lanes`, number `index`.
void check_step(const Lanes& lanes, size_t index) {
  const auto steps = [&](const char* name) {
    return within(lanes.at("step"), name, {"", 0, 1e300});
  };
  const Range forward = steps("forward").at(index), backward = steps("backward").at(index);
  EXPECT_LT(forward.end, backward.start);

  // A block is gathered before it is waited for, and that ends before forward does.
  const auto gathers = within(lanes.at("gather"), "fsdp2::gather ", forward);
  const auto waits = within(lanes.at("wait"), "fsdp2::wait gather ", forward);
  ASSERT_EQ(gathers.size(), 3U);
  ASSERT_EQ(waits.size(), 3U);
  for (size_t i = 0; i < gathers.size(); ++i) {
    EXPECT_EQ(gathers[i].name.substr(sizeof "fsdp2::gather"),
              waits[i].name.substr(sizeof "fsdp2::wait gather"));
    EXPECT_LE(gathers[i].end, waits[i].start);
  }
  EXPECT_THAT(names(gathers).at(1), HasSubstr("fsdp2::gather layers.0."));
  // In use, it has been gathered: compute between this wait and the next.
  const Range between{"", waits[1].end, waits[2].start};
  EXPECT_FALSE(within(lanes.at("compute"), "aten::", between).empty());

  // Gradients leave in backward, the last block's first, and are there before the optimizer runs.
  const auto reduces = within(lanes.at("reduce"), "fsdp2::reduce ", backward);
  ASSERT_EQ(reduces.size(), 3U);
  EXPECT_THAT(reduces[0].name, HasSubstr("layers.1."));
  EXPECT_THAT(reduces[1].name, HasSubstr("layers.0."));
  const auto reduced = within(lanes.at("wait"), "fsdp2::wait reduce ", backward);
  ASSERT_EQ(reduced.size(), 3U);
  for (size_t i = 0; i < reduced.size(); ++i) EXPECT_LE(reduces[i].end, reduced[i].start);
  const auto optimizer = within(lanes.at("optimizer"), "fsdp2::", {"", backward.end, 1e300});
  ASSERT_GE(optimizer.size(), 2U);
  EXPECT_EQ(optimizer[0].name, "fsdp2::clip_grad_norm_");
  EXPECT_EQ(optimizer[1].name, "fsdp2::optimizer");
}

TEST(Trace, OfABenchShowsWhatEachRankDoes) {
  const TemporaryFolder folder;
  const auto done = run_command(ranks(2, bench_step(folder.path("traces"))));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("trace: " + folder.path("traces/trace.json")));
  EXPECT_EQ(done.err, "");
  const Json trace = Json::parse(std::ifstream(folder.path("traces/trace.json")));
  std::vector<std::string> processes;
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("name") == "process_name") processes.push_back(event.at("args").at("name"));
  }
  EXPECT_THAT(processes, ::testing::ElementsAre("rank 0", "rank 1"));
  const auto lanes = lanes_of(trace, 2);
  for (const Lanes& rank : lanes) {
    std::vector<std::string> found;
    for (const auto& item : rank) found.push_back(item.first);
    EXPECT_THAT(found, IsSupersetOf({"step", "gather", "reduce", "wait", "optimizer", "compute"}));
    for (size_t step = 0; step < 3; ++step) check_step(rank, step);
    EXPECT_EQ(within(rank.at("step"), "forward", {"", 0, 1e300}).size(), 3U);
  }
  // On one clock: no rank's gradients are there before the others have started to send theirs.
  for (const auto& [one, other] : {std::pair(0, 1), {1, 0}}) {
    EXPECT_GT(lanes[one].at("wait").back().end, lanes[other].at("reduce").back().start);
  }
  for (const char* part : {"traces/rank_0.json", "traces/rank_1.json"}) {
    EXPECT_TRUE(Json::parse(std::ifstream(folder.path(part))).contains("traceEvents"));
  }
}

TEST(Trace, IsOneFileWhereItEndsInJson) {
  const TemporaryFolder folder;
  auto command = bench_step(folder.path("all.json"));
  command.insert(command.end(), {"--steps", "1"});
  const auto done = run_command(ranks(2, command));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto lanes = lanes_of(Json::parse(std::ifstream(folder.path("all.json"))), 2);
  for (const Lanes& rank : lanes) check_step(rank, 0);
  using Iterator = std::filesystem::directory_iterator;
  EXPECT_EQ(std::distance(Iterator(folder.path()), Iterator()), 1);
}

TEST(Trace, OfTrainingHasTheStepsThatItPromises) {
  const TemporaryFolder folder;
  folder.write("text", std::string(2000, 'a'));
  for (const int steps : {2, 9}) {
    const auto out = folder.path("of_" + std::to_string(steps));
    const auto done = run_command(ranks(2, {"train",
                                            "--data",
                                            folder.path("text"),
                                            "--dim",
                                            "12",
                                            "--layers",
                                            "1",
                                            "--heads",
                                            "2",
                                            "--seq",
                                            "16",
                                            "--batch",
                                            "2",
                                            "--accum",
                                            "2",
                                            "--threads",
                                            "1",
                                            "--steps",
                                            std::to_string(steps),
                                            "--trace",
                                            out}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    EXPECT_THAT(done.err, HasSubstr("wrote a trace to " + out + "/trace.json"));
    const auto lanes = lanes_of(Json::parse(std::ifstream(out + "/trace.json")), 2);
    const size_t traced = steps == 2 ? 1 : 3;
    for (const Lanes& rank : lanes) {
      EXPECT_EQ(within(rank.at("step"), "forward", {"", 0, 1e300}).size(), traced * 2);
      EXPECT_EQ(within(rank.at("optimizer"), "fsdp2::optimizer", {"", 0, 1e300}).size(), traced);
    }
  }
}

TEST(Trace, ThatCannotBeWrittenIsRefusedFirst) {
  const TemporaryFolder folder;
  folder.write("file", "");
  const auto done = run_command(ranks(2, bench_step(folder.path("file/traces"))));
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.err, HasSubstr("--trace: rank 0: "));
}

}  // namespace
}  // namespace fsdp2::testing::traces
