// The launcher when something goes wrong: the message names the first failure, and no process is
// left.

#include "support/command.h"

#include <chrono>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <regex>
#include <signal.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace fsdp2::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> launch(std::vector<std::string> options,
                                const std::vector<std::string>& program) {
  options.insert(options.begin(), {test_variable("FSDP2_BIN"), "run"});
  options.emplace_back("--");
  options.insert(options.end(), program.begin(), program.end());
  return options;
}

std::vector<std::string> launch_worker(const std::vector<std::string>& options,
                                       const std::vector<std::string>& arguments) {
  std::vector<std::string> program{test_variable("FSDP2_FAULT_WORKER")};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return launch(options, program);
}

std::vector<std::string> launch_shell(const std::vector<std::string>& options,
                                      const std::string& script) {
  return launch(options, {"bash", "-c", script});
}

/// Every process that told its number as "pid N" is to have ended, or to end at once.
void expect_none_left(const std::string& output, size_t count) {
  const std::regex pattern("pid (\\d+)");
  size_t found = 0;
  for (std::sregex_iterator match(output.begin(), output.end(), pattern), end; match != end;
       ++match, ++found) {
    const pid_t pid = std::stoi((*match)[1]);
    EXPECT_TRUE(ends_within(pid, milliseconds(500))) << "process " << pid << " is left";
  }
  EXPECT_EQ(found, count) << output;
}

struct Fault {
  const char* action;
  int exit_code;
  const char* reason;
  const char* words;
};

class RankFails : public ::testing::TestWithParam<Fault> {};

TEST_P(RankFails, AllEndAndTheFirstIsNamed) {
  const Fault& fault = GetParam();
  const auto result = run_command(launch_worker({"-n", "4"}, {fault.action, "2"}));
  EXPECT_EQ(result.exit_code, fault.exit_code);
  EXPECT_LT(result.elapsed.count(), 20);  // 10 s and the start of four processes on a busy machine
  EXPECT_THAT(result.err, HasSubstr(std::string("rank 2 failed first: ") + fault.reason));
  const size_t report = result.err.find("failed first");
  ASSERT_NE(report, std::string::npos);
  EXPECT_THAT(result.err.substr(report), HasSubstr(fault.words));
  expect_none_left(result.out, 4);
}

INSTANTIATE_TEST_SUITE_P(
    Launcher, RankFails,
    ::testing::Values(Fault{"exit", 3, "exit code 3", "this rank leaves with 3"},
                      Fault{"throw", 128 + SIGABRT, "killed by SIGABRT", "this rank gives up"},
                      Fault{"kill", 128 + SIGKILL, "killed by SIGKILL", "memory"},
                      Fault{"segv", 128 + SIGSEGV, "killed by SIGSEGV", "after the start"}),
    [](const auto& info) { return info.param.action; });

TEST(Launcher, SigtermEndsAllRanks) {
  Command command(launch_worker({"-n", "4"}, {"none", "0"}));
  for (const char* rank : {"rank 0 of", "rank 1 of", "rank 2 of", "rank 3 of"})
    command.wait_for_output(rank);
  command.signal(SIGTERM);
  const auto result = command.wait(std::chrono::seconds(10));
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("received SIGTERM"));
  EXPECT_THAT(result.err, Not(HasSubstr("failed first")));
  expect_none_left(result.out, 4);
}

TEST(Launcher, SigintReachesTheRanksAsSigint) {
  Command command(launch_shell({"-n", "2"},
                               "trap 'echo interrupted; exit 0' INT; echo ready; sleep 60 & wait"));
  command.wait_for_output("[rank 0] ready");
  command.wait_for_output("[rank 1] ready");
  command.signal(SIGINT);
  const auto result = command.wait(std::chrono::seconds(10));
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.out, HasSubstr("[rank 0] interrupted"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] interrupted"));
}

TEST(Launcher, SigusrIsPassedOnAndEndsNothing) {
  Command command(launch_shell(
      {"-n", "2"}, "trap 'echo told; exit 0' USR1; echo ready; while :; do sleep 0.05; done"));
  command.wait_for_output("[rank 0] ready");
  command.wait_for_output("[rank 1] ready");
  command.signal(SIGUSR1);
  const auto result = command.wait(std::chrono::seconds(10));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 1] told"));
}

TEST(Launcher, ARankMayEndBeforeTheOthers) {
  const auto result = run_command(launch_worker({"-n", "4"}, {"early", "1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 3] sum 30"));
  expect_none_left(result.out, 4);
}

TEST(Launcher, MissingProgramIsAnErrorBeforeAnythingStarts) {
  auto result = run_command(launch({"-n", "2"}, {"no-such-program"}));
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("'no-such-program' was not found in PATH"));
  result = run_command(launch({"-n", "2"}, {"./no/such/program"}));
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("'./no/such/program' does not exist"));
  result = run_command(launch({"-n", "2"}, {std::filesystem::temp_directory_path()}));
  EXPECT_EQ(result.exit_code, 126);
  EXPECT_THAT(result.err, HasSubstr("is a folder"));
}

TEST(Launcher, PortInUseIsAnErrorBeforeAnythingStarts) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto result = run_command(launch({"-n", "2", "--master-port", port}, {"echo", "started"}));
  close(listener);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("port " + port + " is in use"));
  EXPECT_THAT(result.out, Not(HasSubstr("started")));
}

TEST(Launcher, RankThatIgnoresSigtermIsKilled) {
  const auto result =
      run_command(launch_shell({"-n", "3", "--grace", "0.3"},
                               "trap '' TERM; echo pid $$; if [ $RANK = 1 ]; then sleep 0.3; exit "
                               "7; fi; while :; do sleep 0.05; done"));
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_LT(result.elapsed.count(), 5);
  EXPECT_THAT(result.err, HasSubstr("rank 2 did not end in time"));
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed first: exit code 7"));
  expect_none_left(result.out, 3);
}

TEST(Launcher, ASecondSignalTakesTheGraceAway) {
  Command command(
      launch_shell({"-n", "2"}, "trap '' INT; echo pid $$; while :; do sleep 0.05; done"));
  command.wait_for_output("[rank 0] pid");
  command.wait_for_output("[rank 1] pid");
  command.signal(SIGINT);
  command.wait_for_output("received SIGINT");
  command.signal(SIGINT);
  const auto result = command.wait(std::chrono::seconds(5));
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  expect_none_left(result.out, 2);
}

// Each rank leaves a child in its own process group, and one in a session of its own.
constexpr const char* kWithChildren =
    "sleep 60 & echo pid $!; setsid sleep 60 & echo pid $!; echo pid $$; echo all told; ";

TEST(Launcher, WhatRanksLeaveBehindIsKilled) {
  const auto result = run_command(launch_shell({"-n", "2"}, std::string(kWithChildren) + "exit 0"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_none_left(result.out, 6);
}

TEST(Launcher, NothingIsLeftWhenTheLauncherIsKilled) {
  Command command(launch_shell({"-n", "2"}, std::string(kWithChildren) + "wait"));
  command.wait_for_output("[rank 0] all told");
  command.wait_for_output("[rank 1] all told");
  command.signal(SIGKILL);
  expect_none_left(command.wait().out, 6);
}

TEST(Launcher, NothingIsLeftWhenTheSupervisorIsKilled) {
  Command command(
      launch_shell({"-n", "2"}, std::string(kWithChildren) + "echo parent $PPID.; wait"));
  command.wait_for_output("[rank 0] all told");
  command.wait_for_output("[rank 1] all told");
  command.wait_for_output("parent ");
  command.wait_for_output(".");
  const std::string word = "parent ";
  kill(std::stoi(command.output().substr(command.output().find(word) + word.size())), SIGKILL);
  const auto result = command.wait(std::chrono::seconds(10));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err, HasSubstr("supervisor was killed by SIGKILL"));
  expect_none_left(result.out, 6);
}

TEST(Launcher, RanksEndWhenNobodyReadsTheirOutput) {
  const std::string command =
      test_variable("FSDP2_BIN") + " run -n 2 -- bash -c 'while :; do echo line; done'";
  const auto result =
      run_command({"bash", "-c", command + " | head -n 3; echo code ${PIPESTATUS[0]}"});
  EXPECT_THAT(result.out, HasSubstr("code 141"));
}

TEST(Launcher, RefusesOptionsThatCannotBe) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"-n", "0"}, "--nproc-per-node must be at least 1, not 0"},
      {{"-n", "two"}, "two"},
      {{"--nnodes", "2"}, "--master-port"},
      {{"--nnodes", "2", "--node-rank", "2", "--master-port", "29500"},
       "--node-rank must be from 0 to 1, not 2"},
      {{"--master-port", "70000"}, "from 1 to 65535, not 70000"},
      {{"--no-such-option"}, "--no-such-option"},
  };
  for (const auto& [options, message] : cases) {
    const auto result = run_command(launch(options, {"echo", "started"}));
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "") << message;
  }
}

}  // namespace
}  // namespace fsdp2::testing
