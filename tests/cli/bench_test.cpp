// fsdp2 bench overhead: that it measures what it says, not how long it takes.

#include "support/command.h"
#include "support/temporary_folder.h"

#include <algorithm>
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

}  // namespace
}  // namespace fsdp2::testing::bench
