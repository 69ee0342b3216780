// fsdp2 bench overhead and scale, and the scripts around them: that they measure what they say, not
// how long it takes.

#include "support/command.h"
#include "support/temporary_folder.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::testing::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

std::vector<std::string> on_ranks_of_bench(int count, const std::vector<std::string>& options) {
  const std::string program = test_variable("FSDP2_BIN");
  std::vector<std::string> command{program, "run",   "-n",   std::to_string(count),
                                   "--",    program, "bench"};
  command.insert(command.end(), options.begin(), options.end());
  return command;
}

Json read_json(const std::string& path) { return Json::parse(std::ifstream(path)); }

std::vector<int> column(const Json& rows, const char* key) {
  std::vector<int> values;
  for (const Json& row : rows) values.push_back(row.at(key));
  return values;
}

void check_costs(const Json& rows) {
  for (const Json& row : rows) {
    const double plain = row.at("plain_us"), sharded = row.at("sharded_us");
    EXPECT_GT(plain, 0) << row;
    EXPECT_GT(sharded, 0) << row;
    EXPECT_DOUBLE_EQ(row.at("overhead_us").get<double>(), sharded - plain);
    EXPECT_DOUBLE_EQ(row.at("group_us").get<double>() * row.at("groups").get<double>(),
                     sharded - plain);
    // Once in forward and, but for the last and the first, in backward, again.
    const int groups = row.at("groups");
    EXPECT_EQ(row.at("all_gathers"), groups + std::max(0, groups - 2)) << row;
  }
}

TEST(Bench, OverheadOfOpsAndGroups) {
  const TemporaryFolder folder;
  const auto path = folder.path("report");
  const auto done =
      run_command(on_ranks_of_bench(2, {"overhead", "--groups", "2,3", "--steps", "3", "--repeats",
                                        "3", "--simulated-ranks", "16", "--json", path}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("Linear forward, 2 gathered parameters"));
  EXPECT_THAT(done.out, HasSubstr("one of 16 ranks, simulated"));
  const Json report = read_json(path);
  ASSERT_EQ(report.at("ops").size(), 5U);
  for (const Json& op : report.at("ops")) {
    EXPECT_GT(op.at("plain_ns").get<double>(), 0) << op;
    EXPECT_GT(op.at("ours_ns").get<double>(), 0) << op;
  }
  for (const char* part : {"groups", "simulated", "simulated_by_size"}) {
    EXPECT_THAT(column(report.at(part), "groups"), ElementsAre(2, 3)) << part;
    check_costs(report.at(part));
  }
  EXPECT_THAT(column(report.at("groups"), "ranks"), ElementsAre(2, 2));
  EXPECT_THAT(column(report.at("simulated"), "ranks"), ElementsAre(16, 16));
}

TEST(Bench, ScaleHasARowForEachSizeAndNumberOfGroups) {
  const TemporaryFolder folder;
  const auto path = folder.path("report");
  const auto done = run_command(on_ranks_of_bench(
      3, {"scale", "--groups", "1,4", "--bytes", "80,1500", "--steps", "3", "--json", path}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const Json report = read_json(path);
  EXPECT_EQ(report.at("ranks"), 3);
  EXPECT_THAT(column(report.at("rows"), "groups"), ElementsAre(1, 4, 1, 4));
  // Layers of 4 and 19: with their biases 4 (16 + 4) and 4 (361 + 19) bytes.
  EXPECT_THAT(column(report.at("rows"), "bytes"), ElementsAre(80, 80, 1520, 1520));
  check_costs(report.at("rows"));
  const auto refused = run_command(on_ranks_of_bench(1, {"scale", "--groups", "0"}));
  EXPECT_EQ(refused.exit_code, 2);
}

class BenchScripts : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* python = std::getenv("FSDP2_PYTHON");
    if (python == nullptr || *python == '\0') GTEST_SKIP() << "no Python";
    python_ = python;
  }

  CommandResult script(const std::string& name, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(),
                     {python_, test_variable("FSDP2_SOURCE") + "/bench/" + name});
    return run_command(arguments, {{"PYTHONDONTWRITEBYTECODE", "1"}});
  }
  /// The words in a plot; failure if it is no XML.
  std::string words(const std::string& svg) const {
    const auto done = run_command({python_, "-c",
                                   "import sys, xml.etree.ElementTree as tree\n"
                                   "root = tree.parse(sys.argv[1]).getroot()\n"
                                   "assert root.tag.endswith('svg'), root.tag\n"
                                   "print('|'.join(item.text or '' for item in root.iter()))",
                                   svg});
    EXPECT_EQ(done.exit_code, 0) << done.err;
    return done.out;
  }

  const TemporaryFolder folder_;
  std::string python_;
};

TEST_F(BenchScripts, ScaleMakesATableAndAPlot) {
  const auto json = folder_.path("rows"), svg = folder_.path("plots/scale.svg");
  const auto done =
      script("scale.py", {test_variable("FSDP2_BIN"), "--ranks", "1", "2", "--groups", "2", "6",
                          "--bytes", "80", "--steps", "3", "--json", json, "--svg", svg});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("80 bytes of parameters a group"));
  EXPECT_THAT(done.out, HasSubstr("growth"));
  EXPECT_EQ(read_json(json).at("rows").size(), 4U);
  EXPECT_THAT(words(svg), HasSubstr("parameter groups"));
  EXPECT_THAT(words(svg), HasSubstr("2 ranks"));
}

TEST_F(BenchScripts, ScaleMarksWhatGrowsFasterThanGroups) {
  const auto rows = folder_.write("rows", R"({"rows": [
      {"bytes": 2048, "ranks": 1, "groups": 4, "overhead_us": 40.0},
      {"bytes": 2048, "ranks": 1, "groups": 64, "overhead_us": 640.0},
      {"bytes": 2048, "ranks": 2, "groups": 4, "overhead_us": 40.0},
      {"bytes": 2048, "ranks": 2, "groups": 64, "overhead_us": 10240.0}]})");
  const auto done = script("scale.py", {"--from", rows, "--svg", folder_.path("svg")});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("2 KiB of parameters a group"));
  EXPECT_THAT(done.out, HasSubstr("640 (10.0)"));
  EXPECT_THAT(done.out, ::testing::ContainsRegex("growth +1.00 +2.00 !"));
}

TEST_F(BenchScripts, RunDrawsItsTable) {
  const auto svg = folder_.path("step.svg");
  const auto done = script("run.py", {test_variable("FSDP2_BIN"), "--sizes", "tiny", "--variants",
                                      "unsharded", "hsdp", "--repeats", "1", "--svg", svg});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(words(svg), HasSubstr("A training step on 2 ranks"));
  EXPECT_THAT(words(svg), HasSubstr("hsdp"));
}

}  // namespace
}  // namespace fsdp2::testing::bench
