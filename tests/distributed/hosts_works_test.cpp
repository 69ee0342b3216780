// Works of backend "hosts" that are on their way at the same time, waited for in other orders, or
// not at all.

#include "support/collective_checks.h"
#include "support/fuzz.h"
#include "support/host_groups.h"

#include <fsdp2/collectives.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <thread>

namespace fsdp2::testing::hosts_works {
namespace {

using namespace std::chrono_literals;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kLarge = 300'001;

class HostsWorks : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Shapes, HostsWorks,
                         ::testing::Values(Hosts{"a", "a", "b"}, Hosts{"a", "b", "a", "b"},
                                           Hosts{"a", "b", "c", "b"}));

TEST_P(HostsWorks, SeveralAtOnceInOtherOrdersOnEachRank) {
  on_hosts(GetParam(), [](int rank) {
    Dice dice(static_cast<unsigned>(rank));
    for (int round = 0; round < 5; ++round) {
      std::deque<Sum> sums;
      for (int i = 0; i < 8; ++i) {
        sums.emplace_back(world_group(), i % 3 == 0 ? kLarge : 10);
        if (dice.one_in(3)) std::this_thread::sleep_for(std::chrono::microseconds(dice.upto(2000)));
      }
      std::vector<size_t> order(sums.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), dice.engine());
      for (const size_t i : order) {
        sums[i].work->wait();
        EXPECT_TRUE(sums[i].work->isCompleted() && sums[i].work->isSuccess());
        sums[i].expect_right(world_group());
      }
    }
  });
}

TEST_P(HostsWorks, TwoGroupsInOtherOrders) {
  on_hosts(GetParam(), [](int rank) {
    std::vector<int> all(static_cast<size_t>(get_world_size()));
    std::iota(all.begin(), all.end(), 0);
    const ProcessGroup groups[] = {new_group(all), new_group(all)};
    EXPECT_EQ(backend_name(groups[1]), "hosts");
    for (int round = 0; round < 4; ++round) {
      // Both are on their way everywhere before any rank waits, in its own order.
      std::deque<Sum> sums;
      const int first = rank % 2;
      for (const int which : {first, 1 - first}) sums.emplace_back(groups[which], kLarge);
      for (const size_t i : {size_t{0}, size_t{1}}) {
        sums[i].work->wait();
        sums[i].expect_right(groups[i == 0 ? first : 1 - first]);
      }
    }
  });
}

TEST_P(HostsWorks, PollsAloneSeeTheirEnd) {
  on_hosts(GetParam(), [](int) {
    const Sum sum(world_group(), kLarge);
    while (!sum.work->isCompleted()) std::this_thread::yield();
    EXPECT_EQ(sum.work->exception(), nullptr);
    EXPECT_EQ(sum.work->result().size(), 1U);
    sum.expect_right(world_group());
  });
}

TEST_P(HostsWorks, FuturesComeWithoutAWait) {
  on_hosts(GetParam(), [](int) {
    std::deque<Sum> sums;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    std::atomic<int> told = 0;
    for (int i = 0; i < 4; ++i) {
      sums.emplace_back(world_group(), i == 1 ? kLarge : 5);
      futures.push_back(sums.back().work->getFuture());
      EXPECT_EQ(futures.back().get(), sums.back().work->getFuture().get());
      futures.back()->addCallback([&told](c10::ivalue::Future&) { ++told; });
    }
    for (size_t i = 0; i < futures.size(); ++i) {
      futures[i]->waitAndThrow();
      EXPECT_TRUE(futures[i]->value().toTensorVector()[0].is_same(sums[i].tensors[0]));
      sums[i].expect_right(world_group());
    }
    while (told < 4) std::this_thread::yield();
    sums.emplace_back(world_group(), 7);
    sums.back().work->wait();
    EXPECT_TRUE(sums.back().work->getFuture()->completed());
  });
}

TEST_P(HostsWorks, OnesThatAreDroppedAreDone) {
  on_hosts(GetParam(), [](int) {
    std::vector<Sum> sums;
    for (int i = 0; i < 10; ++i) {
      sums.emplace_back(world_group(), i % 2 == 0 ? 10 : kLarge);
      sums.back().work.reset();
    }
    const Sum last(world_group(), 3);
    last.work->wait();
    for (const Sum& sum : sums) sum.expect_right(world_group());
  });
}

TEST_P(HostsWorks, AGroupIsLeftWhenItsWorksAreDone) {
  on_hosts(GetParam(), [this](int rank) {
    ProcessGroup group = group_on(GetParam(), comm::kBest, "left");
    const ProcessGroup kept = world_group();
    std::deque<Sum> sums;
    for (const int64_t size : {kLarge, int64_t{3}, kLarge}) sums.emplace_back(group, size);
    if (rank == 1) std::this_thread::sleep_for(100ms);
    group.reset();
    for (const Sum& sum : sums) {
      EXPECT_TRUE(sum.work->isCompleted());
      sum.work->wait();
      sum.expect_right(kept);
    }
  });
}

TEST_P(HostsWorks, TheWorldIsLeftWhileTheyAreOnTheirWay) {
  on_hosts(GetParam(), [](int rank) {
    const int world = get_world_size();
    if (rank == 1) std::this_thread::sleep_for(100ms);
    const Sum sum(world_group(), kLarge);
    destroy_process_group();
    sum.work->wait();
    EXPECT_TRUE(sum.tensors[0].equal(torch::full({kLarge}, world * (world + 1) / 2.0)));
  });
}

TEST_P(HostsWorks, AFutureMayHoldTheLastOfAGroup) {
  on_hosts(GetParam(), [this](int) {
    std::atomic<bool> told = false;
    {
      auto group = std::make_shared<ProcessGroup>(group_on(GetParam(), comm::kBest, "held"));
      Tensors tensors = {torch::ones({kLarge})};
      const Work work = cpu_backend(*group)->allreduce(tensors);
      work->getFuture()->addCallback([&told, group](c10::ivalue::Future&) mutable {
        group.reset();
        told = true;
      });
    }
    while (!told) std::this_thread::yield();
  });
}

TEST_P(HostsWorks, GroupsOfSeveralThreads) {
  on_hosts(GetParam(), [this](int) {
    const ProcessGroup other = group_on(GetParam(), comm::kBest, "other");
    const auto run = [](const ProcessGroup& group) {
      for (int i = 0; i < 30; ++i) {
        const Sum sum(group, i % 7 == 0 ? kLarge : 9);
        sum.work->wait();
        sum.expect_right(group);
      }
    };
    std::thread second([&] { run(other); });
    run(world_group());
    second.join();
  });
}

TEST_P(HostsWorks, ThoseOfGlooGoOnAtTheSameTime) {
  on_hosts(GetParam(), [](int rank) {
    const auto backend = cpu_backend(world_group());
    for (int round = 0; round < 10; ++round) {
      const Sum sum(world_group(), kLarge);
      Tensors sent = {torch::full({70'000}, rank == 0 ? round : -1.0)};
      const Work broadcast = backend->broadcast(sent);
      Tensors message = {torch::full({1000}, rank == 0 ? round : -1.0)};
      Work passed;
      if (rank < 2) {
        passed = rank == 0 ? backend->send(message, 1, round) : backend->recv(message, 0, round);
      }
      const Sum second(world_group(), 5);
      second.work->wait();
      broadcast->wait();
      if (passed) passed->wait();
      sum.work->wait();
      sum.expect_right(world_group());
      second.expect_right(world_group());
      EXPECT_TRUE(sent[0].eq(round).all().item<bool>());
      EXPECT_TRUE(rank > 1 || message[0].eq(round).all().item<bool>());
    }
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 20U);
  });
}

TEST_P(HostsWorks, SumsHaveTheSameBitsOnAllRanksAndInAllRuns) {
  on_hosts(GetParam(), [](int rank) {
    Dice own(static_cast<unsigned>(rank));
    for (const int64_t size : {100, 100'001}) {
      const Tensor input = random_values(rank, size, at::kFloat);
      Tensor first;
      for (int run = 0; run < 10; ++run) {
        Tensors tensors = {input.clone()};
        std::this_thread::sleep_for(std::chrono::microseconds(own.upto(500)));
        cpu_backend(world_group())->allreduce(tensors)->wait();
        if (!first.defined()) first = tensors[0];
        EXPECT_TRUE(first.equal(tensors[0]));
      }
      const Tensor all = torch::zeros({get_world_size(), size});
      wait(all_gather_single(all, first, world_group()));
      EXPECT_TRUE(all.eq(first).all().item<bool>());
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::hosts_works
