// fsdp2 plan as a command.

#include "support/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::testing::plan_command {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

CommandResult plan(const std::vector<std::string>& options) {
  std::vector<std::string> command{test_variable("FSDP2_BIN"), "plan"};
  command.insert(command.end(), options.begin(), options.end());
  return run_command(command);
}

TEST(PlanCommand, PrintsATable) {
  const auto result = plan({"--preset", "405b", "--ranks", "1024", "--param-dtype", "bf16"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("405853.389M parameters on 1024 ranks"));
  EXPECT_THAT(result.out, HasSubstr("(estimate)"));
  EXPECT_THAT(result.out, HasSubstr("peak: "));
}

TEST(PlanCommand, WritesJson) {
  const auto result =
      plan({"--preset", "8b", "--ranks", "16", "--replicate", "4", "--offload", "true", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json json = Json::parse(result.out);
  EXPECT_EQ(json["shard"], 4);
  EXPECT_EQ(json["parameters"], 8030261248);
  const Json& rest = json["moments"][0];
  EXPECT_EQ(rest["shards"], json["shard_parameters"].get<int64_t>() * 4);
  EXPECT_EQ(rest["optimizer"], rest["shards"].get<int64_t>() * 2);
  EXPECT_EQ(rest["device"], 0);
  EXPECT_LT(json["device_peak_bytes"], json["peak_bytes"]);
}

TEST(PlanCommand, RefusesAMeshThatDoesNotDivide) {
  const auto result = plan({"--ranks", "6", "--replicate", "4"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("not a multiple of --replicate 4"));
}

}  // namespace
}  // namespace fsdp2::testing::plan_command
