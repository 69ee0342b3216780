// Memory, counters and presence, on which backend "shm" is built, by themselves.

#include "comm/shared_memory.h"

#include "support/errors.h"
#include "support/ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <signal.h>
#include <thread>
#include <unistd.h>

namespace fsdp2::testing::shared_memory {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Presence, and one counter of each rank after it.
struct Shared {
  std::shared_ptr<comm::SharedMemory> memory;
  std::unique_ptr<comm::Presence> presence;

  explicit Shared(std::chrono::milliseconds timeout) {
    const int world = get_world_size();
    const size_t bytes = comm::Presence::bytes(world) + sizeof(comm::Counter) * world;
    if (get_rank() == 0) memory = comm::SharedMemory::create(bytes, "test");
    const auto tickets = all_gather_bytes(memory ? memory->ticket() : "", world_group());
    if (get_rank() != 0) memory = comm::SharedMemory::open(tickets[0]);
    EXPECT_EQ(memory->size(), bytes);
    std::vector<int> ranks(world);
    std::iota(ranks.begin(), ranks.end(), 0);
    presence = std::make_unique<comm::Presence>(memory, get_rank(), ranks, "tested", timeout);
    wait(barrier(world_group()));
  }
  comm::Counter& counter(int rank) const {
    std::byte* counters = memory->data() + comm::Presence::bytes(get_world_size());
    return reinterpret_cast<comm::Counter*>(counters)[rank];
  }
};

TEST(SharedMemory, CountersPassATokenAroundInOrder) {
  on_ranks(3, [](int rank) {
    const Shared shared(20s);
    const int before = (rank + 2) % 3;
    for (uint64_t round = 1; round <= 500; ++round) {
      // Rank 0 begins each round; the others follow the rank before them.
      if (rank != 0) shared.presence->wait(shared.counter(before), round, before);
      if (rank == 0 && round > 1) shared.presence->wait(shared.counter(before), round - 1, before);
      if (round % 100 == 0) std::this_thread::sleep_for(2ms);  // so that others sleep
      shared.counter(rank).set(round);
    }
    wait(barrier(world_group()));
    for (int other = 0; other < 3; ++other) EXPECT_EQ(shared.counter(other).get(), 500U);
  });
}

TEST(SharedMemory, OneOfSeveralCountersWakes) {
  on_ranks(2, [](int rank) {
    const Shared shared(20s);
    comm::Counter* const counters[] = {&shared.counter(0), &shared.counter(1)};
    const uint64_t seen[] = {0, 0};
    if (rank == 1) {
      std::this_thread::sleep_for(50ms);
      shared.counter(1).raise();
    } else {
      const auto start = std::chrono::steady_clock::now();
      while (shared.counter(1).get() == 0) comm::await_any(counters, seen, 5000ms);
      EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
      comm::await_any(counters, seen, 5000ms);  // at once
      EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
      const uint64_t now[] = {0, 1};
      comm::await_any(counters, now, 20ms);
      EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
    }
    wait(barrier(world_group()));
  });
}

TEST(SharedMemory, WhoIsLateLeftOrDeadIsNamed) {
  on_ranks(4, [](int rank) {
    const int processes = 4;
    const Shared shared(200ms);
    const auto numbers = all_gather_bytes(std::to_string(getpid()), world_group());
    ASSERT_EQ(numbers.size(), static_cast<size_t>(processes));
    if (rank == 2) shared.presence->leave();
    if (rank == 3) _exit(0);
    if (rank == 0) {
      const auto error = [&](int other) {
        return error_of([&] { shared.presence->wait(shared.counter(other), 1, other); });
      };
      EXPECT_THAT(error(1),
                  AllOf(HasSubstr("waited 200 ms for rank 1 (process " + numbers[1] + ")"),
                        HasSubstr("'tested'")));
      EXPECT_THAT(error(2), HasSubstr("rank 2 (process " + numbers[2] + ") has left"));
      EXPECT_THAT(error(3), HasSubstr("rank 3 (process " + numbers[3] + ") has died"));
      shared.counter(0).set(1);
    }
    // The others stay until rank 0 has looked.
    if (rank != 0) {
      EXPECT_TRUE(shared.counter(0).await(1, 0ns, 10'000ms));
    }
    std::cout.flush();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

TEST(SharedMemory, WhatCannotBeOpenedIsAnError) {
  EXPECT_THAT(error_of([] { comm::SharedMemory::open("1 1000000 10"); }),
              HasSubstr("cannot open the shared memory of process 1"));
  EXPECT_NE(comm::host_identity().find("pid:"), std::string::npos);
  EXPECT_EQ(comm::host_identity(), comm::host_identity());
}

}  // namespace
}  // namespace fsdp2::testing::shared_memory
