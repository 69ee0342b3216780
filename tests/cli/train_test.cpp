// fsdp2 train, generate and bench as commands.

#include "support/command.h"
#include "support/temporary_folder.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

std::vector<std::string> fsdp2(const std::vector<std::string>& arguments) {
  std::vector<std::string> command{test_variable("FSDP2_BIN")};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

std::vector<std::string> on_two_ranks(const std::vector<std::string>& arguments) {
  auto command = fsdp2({"run", "-n", "2", "--"});
  const auto program = fsdp2(arguments);
  command.insert(command.end(), program.begin(), program.end());
  return command;
}

class TrainCommand : public ::testing::Test {
 protected:
  TrainCommand() {
    std::string text;
    for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i) + " of the text\n";
    folder_.write("text/a.txt", text);
  }

  std::vector<std::string> train(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments{"train",
                                       "--data",
                                       folder_.path("text"),
                                       "--dim",
                                       "12",
                                       "--layers",
                                       "1",
                                       "--heads",
                                       "2",
                                       "--seq",
                                       "16",
                                       "--batch",
                                       "4",
                                       "--log-every",
                                       "1",
                                       "--threads",
                                       "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  TemporaryFolder folder_;
};

TEST_F(TrainCommand, TrainsOnTwoRanksAndGenerateGoesOn) {
  const auto out = folder_.path("out");
  const auto done = run_command(
      on_two_ranks(train({"--steps", "30", "--lr", "0.02", "--out", out, "--sample", "9"})));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.err, HasSubstr("2 ranks; 1 documents"));
  EXPECT_THAT(done.err, HasSubstr("step 30/30  loss"));
  EXPECT_THAT(done.out, HasSubstr("validation loss "));
  EXPECT_THAT(done.out, HasSubstr("nats/byte"));
  EXPECT_THAT(done.out, HasSubstr("sample:"));
  const std::vector<std::string> generate{"generate", "--from",   out,  "--prompt",
                                          "line 1",   "--tokens", "12", "--threads",
                                          "1",        "--seed",   "5"};
  const auto one = run_command(fsdp2(generate)), two = run_command(fsdp2(generate));
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, ::testing::StartsWith("line 1"));
  EXPECT_EQ(one.out, two.out);
}

TEST_F(TrainCommand, StartsFromAFolderWhichHasTheSizes) {
  const auto first = folder_.path("first"), second = folder_.path("second");
  auto done = run_command(fsdp2(train({"--steps", "1", "--out", first, "--sample", "0"})));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const std::vector<std::string> from{"train",   "--data",   folder_.path("text"),
                                      "--from",  first,      "--seq",
                                      "8",       "--out",    second,
                                      "--steps", "2",        "--threads",
                                      "1",       "--sample", "4"};
  done = run_command(on_two_ranks(from));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr("sample:"));
  const auto config = Json::parse(std::ifstream(second + "/config.json"));
  EXPECT_EQ(config["hidden_size"], 12);
  EXPECT_EQ(config["max_position_embeddings"], 16);  // not the 8 of a window
  auto sized = from;
  sized.insert(sized.end(), {"--heads", "4"});
  done = run_command(fsdp2(sized));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_THAT(done.err, HasSubstr("--heads: with --from"));

  done = run_command(fsdp2({"generate", "--from", second, "--ids", "--prompt", "108 105",
                            "--tokens", "3", "--threads", "1"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, ::testing::MatchesRegex("([0-9]+ ){3}\n"));
  for (const char* prompt : {"line", "256", "-1", ""}) {
    done = run_command(fsdp2({"generate", "--from", second, "--ids", "--prompt", prompt}));
    EXPECT_EQ(done.exit_code, 1) << prompt;
    EXPECT_THAT(done.err, HasSubstr("prompt")) << prompt;
  }
}

TEST_F(TrainCommand, ASignalStopsItAndTheModelIsSaved) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto out = folder_.path("out" + std::to_string(signal));
    Command command(on_two_ranks(train({"--steps", "1000000", "--out", out})));
    command.wait_for_output("step 3/");
    command.signal(signal);
    const auto done = command.wait();
    EXPECT_EQ(done.exit_code, 128 + signal) << done.err;
    EXPECT_THAT(done.err, HasSubstr(signal == SIGTERM ? "by SIGTERM" : "by SIGINT"));
    EXPECT_TRUE(std::filesystem::exists(out + "/model.safetensors")) << done.err;
    EXPECT_THAT(done.out, Not(HasSubstr("validation loss")));
  }
}

TEST_F(TrainCommand, ReadsAConfigFileAndTheCommandLineWins) {
  const auto config = folder_.write(
      "run.toml", "steps = 7\nlr = 0.25\nwarmup = 1\nmetrics = \"" + folder_.path("m") + "\"\n");
  const auto done = run_command(fsdp2(train({"--config", config, "--steps", "2"})));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  std::ifstream file(folder_.path("m"));
  std::vector<Json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
  ASSERT_EQ(lines.size(), 3);  // two steps and the validation
  EXPECT_DOUBLE_EQ(lines[0]["lr"].get<double>(), 0.25);
  folder_.write("run.toml", "stepz = 7\n");
  const auto unknown = run_command(fsdp2(train({"--config", config})));
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("stepz"));
}

TEST_F(TrainCommand, BadInputIsRefusedBeforeTraining) {
  auto missing = run_command(fsdp2({"train", "--data", folder_.path("none"), "--steps", "1"}));
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.err, HasSubstr("no file or folder " + folder_.path("none")));
  EXPECT_THAT(missing.err, Not(HasSubstr("frame #")));
  EXPECT_EQ(run_command(fsdp2({"train"})).exit_code, 2);
  auto preset = run_command(fsdp2(train({"--preset", "huge"})));
  EXPECT_EQ(preset.exit_code, 2);
  EXPECT_THAT(preset.err, HasSubstr("huge"));
  EXPECT_THAT(run_command(fsdp2(train({"--heads", "5"}))).err,
              HasSubstr("dim 12 is not a multiple of heads 5"));
  EXPECT_THAT(run_command(fsdp2({"generate", "--from", folder_.path()})).err,
              HasSubstr("config.json"));
}

TEST_F(TrainCommand, BenchStepWritesAReport) {
  const std::vector<std::string> sizes{"bench",   "step", "--dim",   "12", "--layers", "1",
                                       "--heads", "2",    "--vocab", "31", "--seq",    "8",
                                       "--batch", "1",    "--steps", "2",  "--warmup", "1"};
  auto arguments = sizes;
  arguments.insert(arguments.end(), {"--json", folder_.path("report")});
  const auto done = run_command(on_two_ranks(arguments));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, ContainsRegex("fsdp2 +W=2"));
  const auto report = Json::parse(std::ifstream(folder_.path("report")));
  EXPECT_EQ(report["losses"].size(), 3);
  EXPECT_EQ(report["per_rank"].size(), 2);
  EXPECT_GE(report["all_gathers"].get<int>(), 2);
  EXPECT_EQ(report["reduce_scatters"], 2);
  arguments = sizes;
  arguments.insert(arguments.end(), {"--param-dtype", "bf16", "--json", folder_.path("low")});
  const auto low = run_command(on_two_ranks(arguments));
  ASSERT_EQ(low.exit_code, 0) << low.err;
  const auto low_report = Json::parse(std::ifstream(folder_.path("low")));
  EXPECT_NEAR(low_report["losses"][2].get<double>(), report["losses"][2].get<double>(), 0.05);
  EXPECT_NE(low_report["losses"], report["losses"]);
  arguments = sizes;
  arguments.insert(arguments.end(), {"--param-dtype", "bf16", "--mode", "local"});
  const auto refused = run_command(fsdp2(arguments));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr("drop --param-dtype"));
}

TEST_F(TrainCommand, BenchStepGivesTheSameLossesInEveryMode) {
  const std::vector<std::string> common{"bench",   "step", "--dim",   "12",  "--layers", "1",
                                        "--heads", "2",    "--vocab", "31",  "--seq",    "8",
                                        "--batch", "1",    "--steps", "3",   "--warmup", "1",
                                        "--accum", "2",    "--clip",  "0.5", "--lr",     "0.05"};
  const auto report = [&](const std::string& mode, bool two_ranks) {
    auto arguments = common;
    const std::string path = folder_.path(mode);
    arguments.insert(arguments.end(), {"--mode", mode, "--json", path});
    if (!two_ranks) arguments.insert(arguments.end(), {"--local-world", "2"});
    const auto done = run_command(two_ranks ? on_two_ranks(arguments) : fsdp2(arguments));
    EXPECT_EQ(done.exit_code, 0) << done.err;
    return Json::parse(std::ifstream(path));
  };
  const auto local = report("local", false);
  for (const std::string mode : {"ddp", "fsdp2"}) {
    const auto ours = report(mode, true);
    EXPECT_EQ(ours["tokens_per_step"], local["tokens_per_step"]);
    for (const char* key : {"losses", "grad_norms"}) {
      const auto expected = local[key].get<std::vector<double>>(),
                 found = ours[key].get<std::vector<double>>();
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found[i] / expected[i], 1, 2e-5) << mode << ' ' << key << " of step " << i;
      }
    }
    for (const auto& [name, sums] : local["final_checksums"].items()) {
      EXPECT_NEAR(ours["final_checksums"][name][1].get<double>() / sums[1].get<double>(), 1, 1e-4)
          << mode << ' ' << name;
    }
  }
}

}  // namespace
}  // namespace fsdp2::testing
