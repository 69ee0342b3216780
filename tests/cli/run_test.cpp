// fsdp2 run when all goes well: environment, output, arguments, and torchrun's contract.

#include "launch/output.h"
#include "launch/port.h"
#include "support/command.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <sstream>
#include <stdlib.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace fsdp2::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> fsdp2_run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {test_variable("FSDP2_BIN"), "run"});
  return arguments;
}

std::vector<std::string> lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> result;
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto result = lines(text);
  std::sort(result.begin(), result.end());
  return result;
}

/// NAME=value lines of the given rank.
std::map<std::string, std::string> variables_of_rank(const std::string& output,
                                                     const std::string& prefix) {
  std::map<std::string, std::string> result;
  for (const std::string& line : lines(output)) {
    const size_t equals = line.find('=');
    if (line.rfind(prefix, 0) != 0 || equals == std::string::npos) continue;
    result[line.substr(prefix.size(), equals - prefix.size())] = line.substr(equals + 1);
  }
  return result;
}

TEST(Run, SetsTorchrunsEnvironment) {
  const auto result =
      run_command(fsdp2_run({"-n", "3", "env"}), {{"OMP_NUM_THREADS", ""}, {"RANK", "99"}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (int rank = 0; rank < 3; ++rank) {
    auto variables = variables_of_rank(result.out, "[rank " + std::to_string(rank) + "] ");
    for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"})
      EXPECT_EQ(variables[name], std::to_string(rank)) << name;
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"})
      EXPECT_EQ(variables[name], "3") << name;
    EXPECT_EQ(variables["GROUP_RANK"], "0");
    EXPECT_EQ(variables["GROUP_WORLD_SIZE"], "1");
    EXPECT_EQ(variables["MASTER_ADDR"], "127.0.0.1");
    EXPECT_GT(std::stoi(variables["MASTER_PORT"]), 0);
    EXPECT_EQ(variables["OMP_NUM_THREADS"],
              std::to_string(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN) / 3)));
    EXPECT_FALSE(variables["TORCHELASTIC_RUN_ID"].empty());
  }
}

TEST(Run, KeepsTheThreadsThatTheUserSet) {
  const auto result = run_command(fsdp2_run({"-n", "2", "bash", "-c", "echo $OMP_NUM_THREADS"}),
                                  {{"OMP_NUM_THREADS", "7"}});
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("[rank 0] 7", "[rank 1] 7"));
}

TEST(Run, TakesTorchrunsSpellings) {
  const auto hyphens = run_command(
      fsdp2_run({"--standalone", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1",
                 "--master-addr=localhost", "--master-port=29501", "--no-python", "bash", "-c",
                 "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"}));
  EXPECT_THAT(sorted_lines(hyphens.out),
              ElementsAre("[rank 2] 2 0 4 1 localhost 29501", "[rank 3] 3 1 4 1 localhost 29501"))
      << hyphens.err;
  const auto underscores = run_command(
      fsdp2_run({"--nnodes", "2", "--nproc_per_node", "2", "--node_rank", "1", "--master_addr",
                 "localhost", "--master_port", "29501", "--no_python", "bash", "-c",
                 "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT"}));
  EXPECT_EQ(sorted_lines(underscores.out), sorted_lines(hyphens.out)) << underscores.err;
}

TEST(Run, WhatFollowsTheProgramBelongsToIt) {
  const std::vector<std::string> program{"printf", "%s,", "-n",         "9",  "--help",
                                         "--",     "run", "--nnodes=3", "a b"};
  const std::string expected = "-n,9,--help,--,run,--nnodes=3,a b,";
  for (const bool separated : {false, true}) {
    std::vector<std::string> arguments{"-n", "1"};
    if (separated) arguments.emplace_back("--");
    arguments.insert(arguments.end(), program.begin(), program.end());
    const auto result = run_command(fsdp2_run(arguments));
    EXPECT_EQ(result.out, expected) << result.err;
  }
  // Named like a subcommand of ours.
  EXPECT_THAT(run_command(fsdp2_run({"-n", "2", "run", "-n", "2"})).err,
              HasSubstr("program 'run' was not found"));
}

TEST(Run, PutsTheRankBeforeEachLine) {
  const auto result = run_command(
      fsdp2_run({"-n", "2", "bash", "-c", "echo out; echo err >&2; printf 'no newline'"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("[rank 0] no newline", "[rank 0] out",
                                                    "[rank 1] no newline", "[rank 1] out"));
  EXPECT_THAT(sorted_lines(result.err), ElementsAre("[rank 0] err", "[rank 1] err"));
}

TEST(Run, LeavesTheOutputOfOneRankAlone) {
  const auto result =
      run_command(fsdp2_run({"bash", "-c", "printf 'a\\rb'; printf c >&2; exit 5"}));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.out, "a\rb");
  EXPECT_EQ(result.err.substr(0, 1), "c");
  EXPECT_THAT(result.err, HasSubstr("rank 0 failed first: exit code 5"));
}

TEST(Run, RanksHaveNothingOnStdin) {
  const auto result = run_command(
      {"bash", "-c",
       "echo given | " + test_variable("FSDP2_BIN") + " run -n 2 -- bash -c 'cat; echo end'"});
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("[rank 0] end", "[rank 1] end"));
}

TEST(Run, OnATerminalRanksFlushEachLine) {
  // script(1) gives the launcher a terminal; what a rank has not flushed when it is killed would be
  // lost.
  const std::string command =
      test_variable("FSDP2_BIN") + " run -n 2 -- bash -c 'test -t 1 && echo a terminal'";
  const auto result = run_command({"script", "-qec", command, "/dev/null"});
  EXPECT_THAT(result.out, HasSubstr("[rank 0] a terminal"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] a terminal"));
}

TEST(Run, HelpTeaches) {
  const auto result = run_command(fsdp2_run({"--help"}));
  EXPECT_EQ(result.exit_code, 0);
  for (const char* part : {"PROGRAM", "Examples:", "Exit codes:", "--nproc-per-node", "RANK"}) {
    EXPECT_THAT(result.out, HasSubstr(part));
  }
}

/// What `pieces`, written one after the other, come out as.
std::string prefixed(const std::vector<std::string>& pieces) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  launch::LinePrefixer prefixer("> ", ends[1]);
  for (const std::string& piece : pieces) prefixer.write(piece);
  prefixer.finish();
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<size_t>(got));
  close(ends[0]);
  return text;
}

TEST(LinePrefixer, JoinsPiecesIntoLines) {
  EXPECT_EQ(prefixed({"a", "b\nc", "\n", "\n", "d"}), "> ab\n> c\n> \n> d\n");
  EXPECT_EQ(prefixed({}), "");
}

TEST(LinePrefixer, KeepsCarriageReturns) {
  EXPECT_EQ(prefixed({"10%\r20%\r", "done\n"}), "> 10%\r> 20%\r> done\n");
  EXPECT_EQ(prefixed({"\r10%", "\r20%", "\n"}), "> 10%\r> 20%\n");
  EXPECT_EQ(prefixed({"dos\r", "\nline\r\n"}), "> dos\n> line\n");
}

TEST(LinePrefixer, KeepsTheLastLinesWithoutStackFrames) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  launch::LinePrefixer prefixer("", ends[1]);
  for (int i = 0; i < 30; ++i)
    prefixer.write("line " + std::to_string(i) + "\nframe #1: nowhere\n");
  EXPECT_EQ(prefixer.last_lines().back(), "line 29");
  EXPECT_EQ(prefixer.last_lines().front(), "line 10");
  close(ends[0]);
  close(ends[1]);
}

std::vector<std::string> sums(const std::string& output) {
  std::vector<std::string> result;
  for (const std::string& line : lines(output)) {
    const size_t at = line.find("sum ");
    if (at != std::string::npos) result.push_back(line.substr(at));
  }
  return result;
}

TEST(Run, RanksOfTwoLaunchersFormOneWorld) {
  const std::string port = std::to_string(launch::free_port());
  const auto node = [&](const std::string& rank) {
    return fsdp2_run({"-n", "2", "--nnodes", "2", "--node-rank", rank, "--master-port", port,
                      test_variable("FSDP2_FAULT_WORKER"), "sum"});
  };
  Command first(node("0"));
  Command second(node("1"));
  const auto first_result = first.wait();
  const auto second_result = second.wait();
  EXPECT_EQ(first_result.exit_code, 0) << first_result.err;
  EXPECT_EQ(second_result.exit_code, 0) << second_result.err;
  EXPECT_THAT(sums(first_result.out), ElementsAre("sum 30", "sum 30"));
  EXPECT_THAT(sums(second_result.out), ElementsAre("sum 30", "sum 30"));
  EXPECT_THAT(second_result.out, HasSubstr("[rank 3] sum 30"));
}

class Torchrun : public ::testing::Test {
 protected:
  void SetUp() override {
    python_ = test_variable("FSDP2_PYTHON");
    if (python_.empty()) GTEST_SKIP() << "no Python that has torch (CMake's FSDP2_PYTHON)";
  }

  std::vector<std::string> torchrun(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(),
                     {python_, "-m", "torch.distributed.run", "--standalone", "--no-python"});
    return arguments;
  }

  std::string python_;
};

TEST_F(Torchrun, StartsTheSameProgram) {
  const std::vector<std::string> program{"--nproc-per-node", "2",
                                         test_variable("FSDP2_FAULT_WORKER"), "sum"};
  const auto theirs = run_command(torchrun(program));
  const auto ours = run_command(fsdp2_run(program));
  EXPECT_EQ(theirs.exit_code, 0) << theirs.err;
  EXPECT_EQ(ours.exit_code, 0) << ours.err;
  EXPECT_THAT(sums(theirs.out), ElementsAre("sum 5", "sum 5"));
  EXPECT_EQ(sums(ours.out), sums(theirs.out));
}

TEST_F(Torchrun, SetsNoVariableThatWeDoNot) {
  const std::set<std::string> of_the_agent{"TORCHELASTIC_ERROR_FILE",
                                           "TORCHELASTIC_SIGNALS_TO_HANDLE",
                                           "TORCH_NCCL_ASYNC_ERROR_HANDLING"};
  const std::set<std::string> of_the_run{"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
                                         "TORCHELASTIC_USE_AGENT_STORE"};
  const auto theirs =
      run_command(torchrun({"--nproc-per-node", "1", "env"}), {{"OMP_NUM_THREADS", "1"}});
  const auto ours =
      run_command(fsdp2_run({"--nproc-per-node", "1", "env"}), {{"OMP_NUM_THREADS", "1"}});
  ASSERT_EQ(theirs.exit_code, 0) << theirs.err;
  const auto our_variables = variables_of_rank(ours.out, "");
  for (const auto& [name, value] : variables_of_rank(theirs.out, "")) {
    if (getenv(name.c_str()) != nullptr || of_the_agent.count(name) > 0) continue;
    ASSERT_EQ(our_variables.count(name), 1) << name;
    if (of_the_run.count(name) == 0) {
      EXPECT_EQ(our_variables.at(name), value) << name;
    }
  }
}

}  // namespace
}  // namespace fsdp2::testing
