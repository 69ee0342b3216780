// What init_process_group reads and refuses before it connects to anything.

#include "comm/environment.h"
#include "comm/groups.h"
#include "support/errors.h"

#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/cuda.h>

#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>

namespace fsdp2 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

class ProcessGroupEnvironment : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  static void clear() {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                             "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}) {
      unsetenv(name);
    }
  }
  static void set(const Variables& variables) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  /// The message that joining with these variables and options ends in.
  static std::string error_of(const Variables& variables, const InitOptions& options = {}) {
    set(variables);
    const auto error = testing::error_of([&] { init_process_group(options); });
    EXPECT_EQ(is_initialized(), error.empty());
    if (is_initialized()) destroy_process_group();
    return error;
  }
};

const Variables kComplete = {{"RANK", "1"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", "29500"}};

Variables changed(const std::string& name, const std::string& value) {
  Variables variables = kComplete;
  variables[name] = value;
  return variables;
}

TEST_F(ProcessGroupEnvironment, ReadsWhatTorchrunSets) {
  set(changed("TORCHELASTIC_USE_AGENT_STORE", "True"));
  const comm::Membership membership = comm::read_membership({});
  EXPECT_EQ(membership.rank, 1);
  EXPECT_EQ(membership.world_size, 4);
  EXPECT_EQ(membership.local_rank, 1);
  EXPECT_EQ(membership.master_addr, "127.0.0.1");
  EXPECT_EQ(membership.master_port, 29500);
  EXPECT_TRUE(membership.agent_store);
  set(changed("TORCHELASTIC_USE_AGENT_STORE", "False"));
  EXPECT_FALSE(comm::read_membership({}).agent_store);
}

TEST_F(ProcessGroupEnvironment, OptionsStandInForVariables) {
  InitOptions options;
  options.rank = 2;
  options.world_size = 3;
  options.master_addr = "node0";
  options.master_port = 1234;
  const comm::Membership membership = comm::read_membership(options);
  EXPECT_EQ(membership.rank, 2);
  EXPECT_EQ(membership.world_size, 3);
  EXPECT_EQ(membership.master_addr, "node0");
  EXPECT_EQ(membership.master_port, 1234);
  EXPECT_EQ(membership.local_rank, std::nullopt);
}

TEST_F(ProcessGroupEnvironment, AStoreTakesThePlaceOfTheAddress) {
  InitOptions options;
  options.rank = 0;
  options.world_size = 2;
  options.store = c10::make_intrusive<c10d::HashStore>();
  set({{"MASTER_PORT", "nonsense"}});
  EXPECT_EQ(comm::read_membership(options).world_size, 2);
}

TEST_F(ProcessGroupEnvironment, EachMissingVariableIsNamed) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = kComplete;
    variables.erase(name);
    EXPECT_THAT(error_of(variables), HasSubstr(c10::str(name, " is not set")));
  }
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(error_of({{"LOCAL_RANK", "0"}}), HasSubstr("RANK is not set"));
}

TEST_F(ProcessGroupEnvironment, EachVariableThatIsNoNumberIsNamed) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}) {
    for (const char* value : {"one", "1x", "1.5", " 1", "99999999999"}) {
      EXPECT_THAT(error_of(changed(name, value)),
                  HasSubstr(c10::str("the variable ", name, " is '", value, "'")));
    }
  }
}

TEST_F(ProcessGroupEnvironment, EachVariableOutOfRangeIsNamed) {
  EXPECT_THAT(error_of(changed("RANK", "4")),
              HasSubstr("RANK is 4, outside 0 to 3 (WORLD_SIZE is 4)"));
  EXPECT_THAT(error_of(changed("RANK", "-1")), HasSubstr("RANK is -1, outside"));
  EXPECT_THAT(error_of(changed("WORLD_SIZE", "0")), HasSubstr("WORLD_SIZE is 0"));
  EXPECT_THAT(error_of(changed("LOCAL_RANK", "2")),
              HasSubstr("LOCAL_RANK is 2, outside 0 to 1 (LOCAL_WORLD_SIZE"));
  EXPECT_THAT(error_of(changed("LOCAL_WORLD_SIZE", "5")),
              HasSubstr("LOCAL_WORLD_SIZE is 5, outside 1 to WORLD_SIZE"));
  EXPECT_THAT(error_of(changed("MASTER_PORT", "65536")),
              HasSubstr("MASTER_PORT is 65536, which is not a port"));
}

TEST_F(ProcessGroupEnvironment, AVariableThatContradictsAFieldIsNamed) {
  InitOptions options;
  options.rank = 2;
  EXPECT_THAT(error_of(kComplete, options),
              HasSubstr("InitOptions::rank is 2 but the variable RANK is 1"));
  options = {};
  options.world_size = 5;
  EXPECT_THAT(error_of(kComplete, options),
              HasSubstr("InitOptions::world_size is 5 but the variable WORLD_SIZE is 4"));
  options = {};
  options.master_addr = "node0";
  EXPECT_THAT(error_of(kComplete, options),
              AllOf(HasSubstr("master_addr is 'node0'"), HasSubstr("MASTER_ADDR")));
  options = {};
  options.master_port = 1;
  EXPECT_THAT(error_of(kComplete, options),
              HasSubstr("master_port is 1 but the variable MASTER_PORT is 29500"));
}

TEST_F(ProcessGroupEnvironment, BackendsAndTimeoutsAreChecked) {
  InitOptions options;
  options.backend = "mpi";
  EXPECT_THAT(error_of({}, options), HasSubstr("backend 'mpi' is not known"));
  options.backend = "cpu:nccl";
  EXPECT_THAT(error_of({}, options), HasSubstr("nccl on cpu"));
  options.backend = "tpu:gloo";
  EXPECT_THAT(error_of({}, options), HasSubstr("device type 'tpu'"));
  options.backend = "cpu:gloo,cpu:gloo";
  EXPECT_THAT(error_of({}, options), HasSubstr("names cpu twice"));
  options = {};
  options.timeout = std::chrono::milliseconds(0);
  EXPECT_THAT(error_of({}, options), HasSubstr("timeout is 0 ms"));
}

TEST_F(ProcessGroupEnvironment, NcclThatIsNotThereIsAnError) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is CUDA";
  InitOptions options;
  options.backend = "cpu:gloo,cuda:nccl";
  EXPECT_THAT(error_of({}, options), HasSubstr("use 'gloo'"));
}

TEST_F(ProcessGroupEnvironment, WithNothingSetTheWorldIsThisProcess) {
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(get_local_rank(), 0);
  try {
    world_group();
    FAIL() << "a world before it was joined";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("call fsdp2::init_process_group() first"));
  }
  for (int round = 0; round < 2; ++round) {
    init_process_group();
    EXPECT_TRUE(is_initialized());
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(world_group()->getSize(), 1);
    try {
      init_process_group();
      FAIL() << "joined twice";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("already initialised (rank 0 of 1)"));
    }
    destroy_process_group();
  }
}

TEST_F(ProcessGroupEnvironment, AWorldOfOneNeedsNoAddress) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  init_process_group();
  EXPECT_EQ(get_world_size(), 1);
  destroy_process_group();
}

}  // namespace
}  // namespace fsdp2
