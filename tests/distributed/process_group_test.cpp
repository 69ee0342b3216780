// Joining and leaving a world, between real processes.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <arpa/inet.h>
#include <cstdlib>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace fsdp2 {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_processes;
using testing::on_ranks;
using testing::TemporaryFolder;

/// A socket that listens on a port of the system's choice until it is closed.
struct Listener {
  int handle = socket(AF_INET, SOCK_STREAM, 0);
  int port = 0;

  Listener() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(handle, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(handle, 1), 0);
    getsockname(handle, reinterpret_cast<sockaddr*>(&address), &length);
    port = ntohs(address.sin_port);
  }
  ~Listener() { close(handle); }
};

int free_port() { return Listener().port; }

void set_variables(int rank, int world, int port) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(world).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", std::to_string(world).c_str(), 1);
  setenv("MASTER_ADDR", "localhost", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
}

InitOptions with_timeout(std::chrono::milliseconds timeout) {
  InitOptions options;
  options.timeout = timeout;
  return options;
}

void expect_world_works(int rank, int world) {
  EXPECT_EQ(get_rank(), rank);
  EXPECT_EQ(get_world_size(), world);
  EXPECT_EQ(get_local_rank(), rank);
  EXPECT_EQ(get_device(), c10::Device(c10::kCPU));
  const auto ranks = torch::full({1}, rank + 1.0);
  wait(all_reduce(ranks, ReduceOp::kSum, world_group()));
  EXPECT_EQ(ranks.item<double>(), world * (world + 1) / 2);
}

class JoinWorld : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, JoinWorld, ::testing::Values(1, 2, 3, 4));

TEST_P(JoinWorld, FromTheEnvironmentAndAgainOnTheSamePort) {
  const int world = GetParam(), port = free_port();
  on_processes(world, [=](int rank) {
    set_variables(rank, world, port);
    for (int round = 0; round < 3; ++round) {
      init_process_group(with_timeout(20s));
      expect_world_works(rank, world);
      // The host of the store does not leave before the others.
      if (rank == world - 1) std::this_thread::sleep_for(20ms);
      const ProcessGroup last = new_group({world - 1});
      destroy_process_group();
      EXPECT_FALSE(is_initialized());
      EXPECT_EQ(get_world_size(), 1);
    }
  });
}

TEST_P(JoinWorld, FromOptions) {
  const int world = GetParam(), port = free_port();
  on_processes(world, [=](int rank) {
    InitOptions options = with_timeout(20s);
    options.backend = "gloo";
    options.rank = rank;
    options.world_size = world;
    options.master_addr = "127.0.0.1";
    options.master_port = port;
    init_process_group(options);
    expect_world_works(rank, world);
    destroy_process_group();
  });
}

TEST_P(JoinWorld, WhereTheLauncherServesTheStore) {
  const int world = GetParam(), port = free_port();
  on_processes(world + 1, [=](int index) {
    if (index == world) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(port);
      options.isServer = true;
      const auto store = c10::make_intrusive<c10d::TCPStore>("localhost", options);
      store->wait({"finished"}, 20s);
      return;
    }
    set_variables(index, world, port);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    init_process_group(with_timeout(20s));
    expect_world_works(index, world);
    destroy_process_group();
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    const auto store = c10::make_intrusive<c10d::TCPStore>("localhost", options);
    if (store->add("done", 1) == world) {
      store->set("finished", std::vector<uint8_t>{1});
    }
  });
}

TEST_P(JoinWorld, GroupsThatAreHeldOutliveTheWorld) {
  on_ranks(GetParam(), [](int rank) {
    const ProcessGroup group = world_group();
    destroy_process_group();
    const auto ones = torch::ones({2});
    wait(all_reduce(ones, ReduceOp::kAvg, group));
    EXPECT_TRUE(ones.equal(torch::ones({2})));
    EXPECT_THAT(error_of([] { new_group({0}); }),
                HasSubstr("call fsdp2::init_process_group() first"));
    init_process_group([&] {
      InitOptions options;
      options.rank = rank;
      options.world_size = group->getSize();
      options.store = c10::make_intrusive<c10d::PrefixStore>("again", group->getStore());
      return options;
    }());
    wait(barrier(world_group()));
  });
}

TEST_P(JoinWorld, OneStoreServesSeveralWorldsInTurn) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    InitOptions options;
    options.rank = rank;
    options.world_size = world;
    options.store = c10::make_intrusive<c10d::PrefixStore>("mine", world_group()->getStore());
    for (int round = 0; round < 2; ++round) {
      destroy_process_group();
      init_process_group(options);
      expect_world_works(rank, world);
    }
  });
}

TEST(JoinWorldErrors, ARankThatNeverComesIsNamed) {
  const int port = free_port();
  on_processes(2, [=](int rank) {
    set_variables(rank, 4, port);
    const auto started = std::chrono::steady_clock::now();
    EXPECT_THAT(error_of([] { init_process_group(with_timeout(700ms)); }),
                HasSubstr("waited 700 ms for ranks {2, 3} of {0, 1, 2, 3} to join the world"));
    EXPECT_LT(std::chrono::steady_clock::now() - started, 10s);
    EXPECT_FALSE(is_initialized());
  });
}

TEST(JoinWorldErrors, ATimeoutInOneStoreNamesTheMissing) {
  InitOptions options = with_timeout(200ms);
  options.rank = 1;
  options.world_size = 3;
  options.store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of([&] { init_process_group(options); }),
              HasSubstr("rank 1 waited 200 ms for ranks {0, 2} of {0, 1, 2} to join the world"));
}

TEST(JoinWorldErrors, AnAddressThatNobodyServesIsNamed) {
  const int port = free_port();
  on_processes(1, [=](int) {
    set_variables(1, 2, port);
    EXPECT_THAT(error_of([] { init_process_group(with_timeout(1s)); }),
                AllOf(HasSubstr("rank 1 of 2 could not reach the store at localhost:" +
                                std::to_string(port)),
                      HasSubstr("MASTER_ADDR, MASTER_PORT"), HasSubstr("within 1 s"),
                      HasSubstr("rank 0 must")));
  });
}

TEST(JoinWorldErrors, APortInUseIsNamed) {
  const Listener taken;
  on_processes(1, [&](int) {
    set_variables(0, 1, taken.port);
    EXPECT_THAT(error_of([] { init_process_group(with_timeout(1s)); }),
                HasSubstr(c10::str("port ", taken.port, " (MASTER_PORT) is in use")));
  });
}

TEST(JoinWorldErrors, TwoRanksWithOneLocalRankAreNamedOnAllRanks) {
  const int port = free_port();
  on_processes(3, [=](int rank) {
    set_variables(rank, 3, port);
    if (rank == 2) setenv("LOCAL_RANK", "1", 1);
    EXPECT_THAT(error_of([] { init_process_group(with_timeout(10s)); }),
                AllOf(HasSubstr("ranks 1 and 2 are both on host"), HasSubstr("with LOCAL_RANK 1")));
  });
}

TEST(JoinWorldErrors, TwoNodesOnOneHostMayRepeatLocalRanksWithoutCuda) {
  const int port = free_port();
  on_processes(2, [=](int rank) {
    set_variables(rank, 2, port);
    setenv("LOCAL_RANK", "0", 1);
    setenv("GROUP_RANK", std::to_string(rank).c_str(), 1);
    init_process_group(with_timeout(20s));
    EXPECT_EQ(get_local_rank(), 0);
    destroy_process_group();
  });
}

TEST(JoinWorldErrors, ARankThatIsTakenIsNamed) {
  const int port = free_port();
  const TemporaryFolder folder;
  const auto wait_for = [&](const char* name) {
    while (!std::filesystem::exists(folder.path(name))) std::this_thread::sleep_for(10ms);
  };
  on_processes(3, [&](int index) {
    if (index < 2) {
      set_variables(index, 2, port);
      init_process_group(with_timeout(20s));
      wait(barrier(world_group()));
      if (index == 0) folder.write("joined", "");
      wait_for("refused");
      destroy_process_group();
      return;
    }
    wait_for("joined");
    set_variables(1, 2, port);
    EXPECT_THAT(error_of([] { init_process_group(with_timeout(1s)); }),
                HasSubstr("RANK 1 is taken by process"));
    folder.write("refused", "");
  });
}

TEST(JoinWorldErrors, AnUnknownInterfaceIsNamed) {
  on_processes(1, [](int) {
    InitOptions options = with_timeout(1s);
    options.backend = "gloo";
    setenv("GLOO_SOCKET_IFNAME", "nonesuch0", 1);
    EXPECT_THAT(error_of([&] { init_process_group(options); }),
                AllOf(HasSubstr("could not connect group 'world'"), HasSubstr("nonesuch0"),
                      HasSubstr("GLOO_SOCKET_IFNAME")));
    setenv("GLOO_SOCKET_IFNAME", "lo", 1);
    init_process_group(options);
    destroy_process_group();
  });
}

TEST(NewGroup, UnevenGroupsInAnyOrder) {
  on_ranks(4, [](int rank) {
    const ProcessGroup three = new_group({3, 0, 1}, "three");
    const ProcessGroup one = new_group({2});
    ASSERT_EQ(three == nullptr, rank == 2);
    ASSERT_EQ(one != nullptr, rank == 2);
    if (rank == 2) {
      EXPECT_EQ(all_gather_bytes("two", one), std::vector<std::string>{"two"});
      return;
    }
    EXPECT_EQ(three->getRank(), (rank + 1) % 4);
    const auto all = torch::zeros({3});
    wait(all_gather_single(all, torch::full({1}, rank, at::kFloat), three));
    EXPECT_TRUE(all.equal(torch::tensor({3.0f, 0.0f, 1.0f})));
  });
}

TEST(NewGroup, RanksThatDisagreeAreToldSo) {
  on_ranks(3, [](int rank) {
    const std::vector<int> ranks = rank == 2 ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 1};
    if (rank == 2) {
      EXPECT_THAT(error_of([&] { new_group(ranks, "trio", 2s); }),
                  HasSubstr("group 'trio' has ranks {0, 1, 2} on rank 2 but {0, 1} on rank 0"));
    } else {
      new_group(ranks, "pair", 10s);
    }
    wait(barrier(world_group()));
  });
}

TEST(NewGroup, RefusesBadRanks) {
  on_ranks(2, [](int) {
    EXPECT_THAT(error_of([] { new_group({}); }), HasSubstr("`ranks` is empty"));
    EXPECT_THAT(error_of([] { new_group({0, 2}); }), HasSubstr("`ranks` has 2, outside 0 to 1"));
    EXPECT_THAT(error_of([] { new_group({1, 1}); }), HasSubstr("`ranks` has 1 twice"));
    EXPECT_THAT(error_of([] { new_group({0, 1}, "", 0ms); }), HasSubstr("`timeout` is 0 ms"));
    const ProcessGroup group = new_group({0, 1});
    wait(barrier(group));
  });
}

}  // namespace
}  // namespace fsdp2
