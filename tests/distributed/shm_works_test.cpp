// How works of backend "shm" are driven: by waits, polls, later calls and futures, in any order
// over several groups and threads; messages between two ranks; and random programs.

#include "support/collective_checks.h"
#include "support/errors.h"
#include "support/fuzz.h"
#include "support/shm_ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <deque>
#include <gtest/gtest.h>
#include <thread>

namespace fsdp2::testing::shm_works {
namespace {

using namespace std::chrono_literals;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

c10::intrusive_ptr<c10d::Backend> backend_of(const ProcessGroup& group) {
  const auto backend = group->getBackend(c10::kCPU);
  EXPECT_EQ(backend->getBackendName(), "shm");
  return backend;
}

// Many times what the shared memory holds.
constexpr int64_t kLarge = 3'000'001;

class ShmWorks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmWorks, ::testing::Values(2, 3, 4));

TEST_P(ShmWorks, PollsAloneBringThemToTheirEnd) {
  on_shm_ranks(GetParam(), [](int) {
    const ProcessGroup group = world_group();
    const Sum sum(group, kLarge);
    while (!sum.work->isCompleted()) std::this_thread::yield();
    EXPECT_TRUE(sum.work->isSuccess());
    EXPECT_EQ(sum.work->exception(), nullptr);
    sum.expect_right(group);
    sum.work->wait();
    EXPECT_EQ(sum.work->result().size(), 1U);
  });
}

TEST_P(ShmWorks, OnesThatAreDroppedAreDoneByLaterWaits) {
  on_shm_ranks(GetParam(), [](int) {
    const ProcessGroup group = world_group();
    std::vector<Sum> sums;
    for (int i = 0; i < 20; ++i) {
      sums.emplace_back(group, i % 2 == 0 ? 10 : kLarge / 20);
      sums.back().work.reset();
    }
    backend_of(group)->barrier()->wait();
    for (const Sum& sum : sums) sum.expect_right(group);
  });
}

TEST_P(ShmWorks, WaitsOfTwoGroupsInDifferentOrders) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    std::vector<int> all(world);
    for (int i = 0; i < world; ++i) all[i] = i;
    const ProcessGroup groups[] = {new_group(all), new_group(all)};
    for (int round = 0; round < 4; ++round) {
      // One rank has not started the second while it waits for the first; others start both.
      const int first = rank % 2;
      if (rank == round % world) {
        for (const int which : {first, 1 - first}) {
          const Sum sum(groups[which], kLarge);
          sum.work->wait();
          sum.expect_right(groups[which]);
        }
      } else {
        const Sum one(groups[0], kLarge), two(groups[1], kLarge);
        (first == 0 ? two : one).work->wait();
        (first == 0 ? one : two).work->wait();
        one.expect_right(groups[0]);
        two.expect_right(groups[1]);
      }
    }
  });
}

TEST(ShmWorksOfFour, GroupsThatOverlap) {
  on_shm_ranks(4, [](int rank) {
    const std::vector<std::vector<int>> members = {{0, 1}, {1, 2},    {2, 3},
                                                   {3, 0}, {0, 1, 2}, {2, 0}};
    std::vector<ProcessGroup> mine;
    for (const auto& ranks : members) {
      if (ProcessGroup group = new_group(ranks)) mine.push_back(group);
    }
    for (int round = 0; round < 3; ++round) {
      std::deque<Sum> sums;
      for (const ProcessGroup& group : mine) sums.emplace_back(group, kLarge / 4 + round);
      for (size_t i = 0; i < sums.size(); ++i) {
        const size_t at = rank % 2 == 0 ? i : sums.size() - 1 - i;
        sums[at].work->wait();
        sums[at].expect_right(mine[at]);
      }
    }
  });
}

TEST_P(ShmWorks, FuturesComeWithoutAWait) {
  on_shm_ranks(GetParam(), [](int) {
    const ProcessGroup group = world_group();
    std::deque<Sum> sums;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    std::atomic<int> told = 0;
    for (int i = 0; i < 4; ++i) {
      sums.emplace_back(group, i == 1 ? kLarge : 5);
      futures.push_back(sums.back().work->getFuture());
      EXPECT_EQ(futures.back().get(), sums.back().work->getFuture().get());
      futures.back()->addCallback([&told](c10::ivalue::Future&) { ++told; });
    }
    sums.emplace_back(group, 7);
    sums.back().work->wait();
    for (size_t i = 0; i < futures.size(); ++i) {
      futures[i]->wait();
      EXPECT_TRUE(futures[i]->value().toTensorVector()[0].is_same(sums[i].tensors[0]));
      sums[i].expect_right(group);
    }
    const auto late = sums.back().work->getFuture();
    EXPECT_TRUE(late->completed());
    while (told < 4) std::this_thread::yield();
  });
}

TEST_P(ShmWorks, SeveralThreadsWait) {
  on_shm_ranks(GetParam(), [](int) {
    const ProcessGroup group = world_group();
    for (int round = 0; round < 5; ++round) {
      std::deque<Sum> sums;
      for (int i = 0; i < 4; ++i) sums.emplace_back(group, i % 2 == 0 ? kLarge / 8 : 3);
      std::vector<std::thread> threads;
      for (int i = 3; i >= 0; --i) threads.emplace_back([&, i] { sums[i].work->wait(); });
      for (std::thread& thread : threads) thread.join();
      for (const Sum& sum : sums) sum.expect_right(group);
    }
  });
}

TEST_P(ShmWorks, AGroupPerThread) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int) {
    std::vector<int> all(world);
    for (int i = 0; i < world; ++i) all[i] = i;
    const ProcessGroup other = new_group(all);
    std::thread second([&] {
      for (int i = 0; i < 50; ++i) {
        const Sum sum(other, i % 10 == 0 ? kLarge / 4 : 9);
        sum.work->wait();
        sum.expect_right(other);
      }
    });
    for (int i = 0; i < 50; ++i) {
      const Sum sum(world_group(), i % 7 == 0 ? kLarge / 4 : 9);
      sum.work->wait();
      sum.expect_right(world_group());
    }
    second.join();
  });
}

Tensor message(int from, int tag, int64_t size) {
  return torch::arange(size, at::kInt) + from * 1000 + tag;
}

TEST_P(ShmWorks, MessagesInAnotherOrderThanTheyWereSent) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    const auto backend = backend_of(world_group());
    const int to = (rank + 1) % world, from = (rank + world - 1) % world;
    const int64_t sizes[] = {0, 1, 100'000, 5, 40'000};  // 40000 ints are more than the ring
    std::vector<Work> works;
    std::deque<Tensors> sent, received;
    for (int tag = 0; tag < 5; ++tag) {
      sent.push_back({message(rank, tag, sizes[tag])});
      works.push_back(backend->send(sent.back(), to, tag));
    }
    for (const int tag : {3, 4, 0, 2, 1}) {
      received.push_back({torch::zeros({sizes[tag]}, at::kInt)});
      const Work work = backend->recv(received.back(), from, tag);
      work->wait();
      EXPECT_EQ(work->sourceRank(), from);
      EXPECT_TRUE(received.back()[0].equal(message(from, tag, sizes[tag]))) << tag;
    }
    for (const Work& work : works) work->wait();
  });
}

TEST_P(ShmWorks, MessagesOfOneTagKeepTheirOrderAndPassCollectives) {
  on_shm_ranks(GetParam(), [](int rank) {
    const auto backend = backend_of(world_group());
    std::deque<Tensors> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 30 && rank < 2; ++i) {
      tensors.push_back({rank == 0 ? message(0, i, 3000) : torch::zeros({3000}, at::kInt)});
      works.push_back(rank == 0 ? backend->send(tensors.back(), 1, 7)
                                : backend->recv(tensors.back(), 0, 7));
    }
    const Sum sum(world_group(), kLarge);
    sum.work->wait();
    sum.expect_right(world_group());
    for (const Work& work : works) work->wait();
    for (int i = 0; i < 30 && rank == 1; ++i)
      EXPECT_TRUE(tensors[i][0].equal(message(0, i, 3000))) << i;
  });
}

TEST_P(ShmWorks, MessagesFromAnyone) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    const auto backend = backend_of(world_group());
    if (rank > 0) {
      Tensors tensors = {message(rank, 5, 20'000)};
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * (world - rank)));
      backend->send(tensors, 0, 5)->wait();
      return;  // and leaves while the first may still wait for others
    }
    std::vector<bool> came(world);
    for (int i = 1; i < world; ++i) {
      Tensors tensors = {torch::zeros({20'000}, at::kInt)};
      const Work work = backend->recvAnysource(tensors, 5);
      work->wait();
      const int from = work->sourceRank();
      EXPECT_TRUE(tensors[0].equal(message(from, 5, 20'000)));
      EXPECT_FALSE(came[from]);
      came[from] = true;
    }
  });
}

/// One step of a random program that all ranks draw alike; what it gives must be the same on all.
struct Step {
  Tensors tensors;
  Tensor wanted;
  Work work;
};

Step random_step(Dice& dice, const ProcessGroup& group, int number) {
  const auto backend = backend_of(group);
  const int ranks = group->getSize(), rank = group->getRank();
  const int64_t size = dice.one_in(3) ? dice.upto(300'000) : dice.upto(40);
  const auto values = [&](int of) {
    return (torch::arange(size, at::kFloat) % 13 + of + number % 17)
        .to(number % 2 == 0 ? at::kFloat : at::kBFloat16);
  };
  Step step;
  const int kind = dice.upto(4);
  const int root = dice.upto(ranks);
  if (kind == 0) {
    Tensors all;
    for (int other = 0; other < ranks; ++other) all.push_back(values(other));
    step.wanted = torch::cat(all);
    step.tensors = {torch::zeros_like(step.wanted), values(rank)};
    step.work = backend->_allgather_base(step.tensors[0], step.tensors[1]);
  } else if (kind == 1) {
    step.wanted = values(root);
    step.tensors = {values(rank)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    step.work = backend->broadcast(step.tensors, options);
  } else if (kind == 2) {
    step.wanted = values(0);
    for (int other = 1; other < ranks; ++other)
      step.wanted = at::maximum(step.wanted, values(other));
    step.tensors = {values(rank)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    step.work = backend->allreduce(step.tensors, options);
  } else {
    Tensor input = values(rank).repeat({ranks});
    step.wanted = values(0).to(at::kFloat);
    for (int other = 1; other < ranks; ++other) step.wanted += values(other).to(at::kFloat);
    step.wanted = step.wanted.to(input.scalar_type());
    step.tensors = {torch::zeros_like(step.wanted), input};
    step.work = backend->_reduce_scatter_base(step.tensors[0], step.tensors[1]);
  }
  return step;
}

void random_program(int rank, unsigned seed, int steps) {
  Dice shared(seed), own(seed * 7 + static_cast<unsigned>(rank) + 1);
  std::vector<ProcessGroup> groups = {world_group(), new_group({0, 1, 2}), new_group({2, 1})};
  std::vector<Dice> dice;
  dice.reserve(3);
  for (unsigned i = 0; i < 3; ++i) dice.emplace_back(seed + i);
  std::deque<Step> open;
  const auto finish = [&] {
    open.front().work->wait();
    EXPECT_TRUE(open.front().tensors[0].equal(open.front().wanted)) << "seed " << seed;
    open.pop_front();
  };
  for (int number = 0; number < steps; ++number) {
    const int which = shared.upto(3);
    const bool all_wait = shared.one_in(4);
    if (groups[which]) open.push_back(random_step(dice[which], groups[which], number));
    if (own.one_in(6)) std::this_thread::sleep_for(std::chrono::microseconds(own.upto(800)));
    while (!open.empty() && (all_wait || open.size() > 6 || own.one_in(5))) finish();
  }
  while (!open.empty()) finish();
}

TEST(ShmPrograms, RandomStepsInSeveralGroupsWithRandomDelays) {
  const auto end = std::chrono::steady_clock::now() + fuzz_time();
  unsigned seed = first_seed();
  do {
    on_shm_ranks(3, [seed](int rank) { random_program(rank, seed, 150); }, 120s);
    ++seed;
  } while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure());
}

TEST(ShmPrograms, SumsHaveTheSameBitsOnAllRanksAndInAllRuns) {
  on_shm_ranks(3, [](int rank) {
    Dice own(static_cast<unsigned>(rank));
    for (const int64_t size : {100, 100'001}) {
      torch::manual_seed(static_cast<uint64_t>(rank));
      const Tensor input = torch::randn({size});
      Tensor first;
      for (int run = 0; run < 10; ++run) {
        Tensors tensors = {input.clone()};
        std::this_thread::sleep_for(std::chrono::microseconds(own.upto(500)));
        backend_of(world_group())->allreduce(tensors)->wait();
        if (!first.defined()) first = tensors[0];
        EXPECT_TRUE(first.equal(tensors[0]));
      }
      const Tensor all = torch::zeros({3, size});
      wait(all_gather_single(all, first, world_group()));
      EXPECT_TRUE(all[0].equal(all[1]) && all[0].equal(all[2]));
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::shm_works
