// Backend "shm" when ranks disagree, leave, die or stop: an error on all that names who and what.

#include "support/errors.h"
#include "support/fuzz.h"
#include "support/shared_outcomes.h"
#include "support/shm_ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace fsdp2::testing::shm_failures {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

c10::intrusive_ptr<c10d::Backend> backend_of(const ProcessGroup& group) {
  const auto backend = group->getBackend(c10::kCPU);
  EXPECT_EQ(backend->getBackendName(), "shm");
  return backend;
}

ProcessGroup all_of(int world, std::chrono::milliseconds timeout) {
  std::vector<int> ranks(world);
  for (int i = 0; i < world; ++i) ranks[i] = i;
  return new_group(ranks, "tried", timeout);
}

Work all_reduce_of(const ProcessGroup& group, int64_t size, c10d::ReduceOp::RedOpType op,
                   at::ScalarType type = at::kFloat) {
  Tensors tensors = {torch::ones({size}, type)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return backend_of(group)->allreduce(tensors, options);
}

Work broadcast_from(const ProcessGroup& group, int root) {
  Tensors tensors = {torch::ones({4})};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return backend_of(group)->broadcast(tensors, options);
}

Work all_gather_of(const ProcessGroup& group, int64_t size) {
  Tensor input = torch::ones({size}), output = torch::zeros({size * group->getSize()});
  return backend_of(group)->_allgather_base(output, input);
}

class ShmDisagreements : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmDisagreements, ::testing::Values(2, 3));

TEST_P(ShmDisagreements, AreTheSameErrorOnAllRanksAtOnce) {
  const int world = GetParam();
  using Start = std::function<Work(const ProcessGroup&)>;
  using Op = c10d::ReduceOp;
  struct Case {
    Start first, other;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](const auto& g) { return all_gather_of(g, 4); },
       [](const auto& g) { return all_gather_of(g, 1000); },
       {"all_gather of 16 bytes", "all_gather of 4000 bytes"}},
      {[](const auto& g) { return all_gather_of(g, 1'000'000); },
       [](const auto& g) { return all_reduce_of(g, 1'000'000, Op::SUM); },
       {"all_gather of 4000000 bytes", "all_reduce of 4000000 bytes (SUM of Float)"}},
      {[](const auto& g) { return all_reduce_of(g, 2, Op::SUM); },
       [](const auto& g) { return all_reduce_of(g, 1, Op::SUM, at::kDouble); },
       {"all_reduce of 8 bytes (SUM of Float)", "all_reduce of 8 bytes (SUM of Double)"}},
      {[](const auto& g) { return all_reduce_of(g, 2, Op::SUM); },
       [](const auto& g) { return all_reduce_of(g, 2, Op::MAX); },
       {"all_reduce of 8 bytes (SUM of Float)", "all_reduce of 8 bytes (MAX of Float)"}},
      {[](const auto& g) { return broadcast_from(g, 0); },
       [](const auto& g) { return broadcast_from(g, 1); },
       {"broadcast of 16 bytes with root 0", "broadcast of 16 bytes with root 1"}},
      {[](const auto& g) { return backend_of(g)->barrier(); },
       [](const auto& g) { return broadcast_from(g, 1); },
       {"barrier", "broadcast of 16 bytes with root 1"}},
  };
  on_shm_ranks(world, [&](int rank) {
    const auto started = std::chrono::steady_clock::now();
    for (const Case& tried : cases) {
      const ProcessGroup group = all_of(world, 20s);
      backend_of(group)->barrier()->wait();
      const std::string error =
          error_of([&] { (rank == 1 ? tried.other : tried.first)(group)->wait(); });
      EXPECT_THAT(error, AllOf(HasSubstr("ranks called different collectives in group 'tried'"),
                               HasSubstr(tried.words[0]), HasSubstr(tried.words[1]),
                               HasSubstr("rank 1 called " + tried.words[1])));
      for (const std::string& other : all_gather_bytes(error, world_group()))
        EXPECT_EQ(other, error);
      EXPECT_EQ(error_of([&] { backend_of(group)->barrier()->wait(); }), error);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - started, 10s);
  });
}

TEST(ShmDisagreementsOfTwo, MessagesOfOtherSizes) {
  on_shm_ranks(2, [](int rank) {
    const ProcessGroup group = all_of(2, 20s);
    Tensors tensors = {torch::ones({rank == 0 ? 10 : 11})};
    const std::string error = error_of([&] {
      (rank == 0 ? backend_of(group)->send(tensors, 1, 3) : backend_of(group)->recv(tensors, 0, 3))
          ->wait();
      backend_of(group)->barrier()->wait();
    });
    EXPECT_THAT(error, HasSubstr("rank 0 sent a message of 40 bytes with tag 3 to rank 1, which "
                                 "expects 44 bytes"));
  });
}

TEST(ShmDisagreementsOfThree, SplitsThatDoNotMeet) {
  on_shm_ranks(3, [](int rank) {
    const ProcessGroup group = all_of(3, 20s);
    // Rank 0 sends 70000 to rank 1, which expects 60000.
    std::vector<int64_t> sent = {10, 70'000, 10}, expected = {10, 10, 10};
    if (rank == 1) sent = {10, 10, 10}, expected = {60'000, 10, 10};
    if (rank == 2) sent = {10, 10, 10}, expected = {10, 10, 10};
    const auto total = [](const std::vector<int64_t>& splits) {
      return splits[0] + splits[1] + splits[2];
    };
    Tensor input = torch::ones({total(sent)}), output = torch::ones({total(expected)});
    EXPECT_THAT(error_of([&] {
                  backend_of(group)->alltoall_base(output, input, expected, sent)->wait();
                  backend_of(group)->barrier()->wait();
                }),
                HasSubstr("bytes to rank 1, which expects 240000"));
  });
}

TEST(ShmEnds, ARankThatIsDoneLeavesWithoutHarm) {
  on_shm_ranks(3, [](int rank) {
    ProcessGroup group = all_of(3, 20s);
    Tensors tensors = {torch::ones({50'000})};
    const Work work = backend_of(group)->allreduce(tensors);
    if (rank != 1) std::this_thread::sleep_for(300ms);
    work->wait();
    EXPECT_EQ(tensors[0].sum().item<float>(), 150'000);
    if (rank == 1) {
      group.reset();
      wait(barrier(world_group()));
      return;
    }
    EXPECT_THAT(error_of([&] { backend_of(group)->barrier()->wait(); }),
                AllOf(HasSubstr("rank 1 (process "), HasSubstr("has left"), HasSubstr("barrier"),
                      HasSubstr("group 'tried'")));
    wait(barrier(world_group()));
  });
}

TEST(ShmEnds, AWaitThatIsTooLongNamesTheLate) {
  on_shm_ranks(4, [](int rank) {
    const ProcessGroup group = all_of(4, 20s);
    if (rank == 1 || rank == 3) {
      std::this_thread::sleep_for(500ms);
      // The group is broken for who comes late, too.
      EXPECT_THAT(error_of([&] { backend_of(group)->barrier()->wait(); }), HasSubstr("timed out"));
    } else {
      Tensors tensors = {torch::ones({9})};
      const std::string error =
          error_of([&] { backend_of(group)->allreduce(tensors)->wait(200ms); });
      EXPECT_THAT(error, AllOf(HasSubstr("timed out: it waited 200 ms for rank 1 (process "),
                               HasSubstr("rank 3 (process "), HasSubstr("all_reduce of 36 bytes")));
    }
    wait(barrier(world_group()));
  });
}

TEST(ShmEnds, AnAbortedGroupIsAnErrorForAll) {
  on_shm_ranks(2, [](int rank) {
    const ProcessGroup group = all_of(2, 20s);
    if (rank == 0) {
      std::this_thread::sleep_for(50ms);
      backend_of(group)->abort();
    }
    EXPECT_THAT(error_of([&] { backend_of(group)->barrier()->wait(); }),
                AllOf(HasSubstr("rank 0 (process "), HasSubstr("has aborted group 'tried'")));
    wait(barrier(world_group()));
  });
}

TEST(ShmEnds, AFutureHasTheErrorToo) {
  on_shm_ranks(2, [](int rank) {
    const ProcessGroup group = all_of(2, 300ms);
    if (rank == 0) {
      Tensors tensors = {torch::ones({9})};
      const auto future = backend_of(group)->allreduce(tensors)->getFuture();
      future->wait();
      EXPECT_TRUE(future->hasError());
      EXPECT_THAT(error_of([&] { future->waitAndThrow(); }), HasSubstr("timed out"));
    }
    wait(barrier(world_group()));
  });
}

TEST(ShmEnds, AGroupThatIsDroppedEndsItsOpenWorks) {
  on_shm_ranks(2, [](int rank) {
    ProcessGroup group = all_of(2, 20s);
    if (rank == 0) {
      Tensors tensors = {torch::ones({9})};
      const Work work = backend_of(group)->allreduce(tensors);
      group.reset();
      EXPECT_THAT(error_of([&] { work->wait(); }), HasSubstr("was left by rank 0"));
    }
    wait(barrier(world_group()));
  });
}

/// Lines of this process's memory map that name the group "tried".
int mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:fsdp2:tried") != std::string::npos) ++count;
  }
  return count;
}

TEST(ShmEnds, GroupsThatAreDroppedLeaveNothing) {
  on_shm_ranks(2, [](int rank) {
    for (int i = 0; i < 10; ++i) {
      const ProcessGroup group = all_of(2, 20s);
      EXPECT_EQ(mappings(), 1);
      all_reduce_of(group, 300'000, c10d::ReduceOp::SUM)->getFuture();
      Tensors tensors = {torch::ones({9})};
      if (rank == 0) backend_of(group)->send(tensors, 1, 1);
      backend_of(group)->barrier()->wait();
      if (i % 2 == rank) backend_of(group)->barrier();  // never done
    }
    EXPECT_EQ(mappings(), 0);
    wait(barrier(world_group()));
  });
}

/// Rank 1 is hit by `signal` while all ranks are busy; the others must say so, and stop.
void hit_a_rank(int signal, unsigned seed) {
  constexpr int world = 3;
  SharedOutcomes outcomes(world);
  const bool stops = signal == SIGSTOP;
  auto* victim = static_cast<std::atomic<pid_t>*>(mmap(nullptr, sizeof(std::atomic<pid_t>),
                                                       PROT_READ | PROT_WRITE,
                                                       MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  on_shm_ranks(
      world,
      [&](int rank) {
        const ProcessGroup group = all_of(world, stops ? 1500ms : 10'000ms);
        Dice dice(seed + static_cast<unsigned>(rank));
        if (rank == 1 && !stops) ::signal(SIGUSR1, [](int) { _exit(0); });
        if (rank == 1) victim->store(getpid());
        wait(barrier(world_group()));
        std::thread hunter;
        if (rank == 0) {
          hunter = std::thread([&] {
            std::this_thread::sleep_for(std::chrono::microseconds(dice.upto(30'000)));
            // Its end is no failure of the test, so it is killed by one that can tell.
            kill(victim->load(), stops ? SIGSTOP : SIGUSR1);
          });
        }
        auto last_good = std::chrono::steady_clock::now();
        const std::string error = error_of([&] {
          for (int i = 0;; ++i) {
            const int64_t size = i % 3 == 0 ? 1'000'000 : i % 3 == 1 ? 5 : 70'000;
            if (i % 2 == 0) all_reduce_of(group, size, c10d::ReduceOp::SUM)->wait();
            if (i % 2 == 1) all_gather_of(group, size)->wait();
            last_good = std::chrono::steady_clock::now();
          }
        });
        const auto took = std::chrono::steady_clock::now() - last_good;
        const char* words = stops ? "timed out" : "has died";
        const bool right = error.find("rank 1 (process ") != std::string::npos &&
                           error.find(words) != std::string::npos && took < 5s;
        outcomes.set(rank, right ? 1 : 0);
        if (!right) std::cerr << "rank " << rank << ": " << error << std::endl;
        if (rank == 0) hunter.join();
        if (rank == 2) {  // which is the last to need it
          while (outcomes.get(0) < 0) std::this_thread::sleep_for(5ms);
          if (stops) {
            outcomes.set(1, 1);
            kill(victim->load(), SIGCONT);
          }
        }
        SharedOutcomes::leave();
      },
      30s);
  EXPECT_EQ(outcomes.get(0), 1) << "signal " << signal << ", seed " << seed;
  EXPECT_EQ(outcomes.get(2), 1) << "signal " << signal << ", seed " << seed;
  munmap(victim, sizeof(std::atomic<pid_t>));
}

TEST(ShmEnds, ARankThatDiesOrStopsAnywhereIsNamed) {
  const unsigned seed = first_seed();
  const unsigned times = fuzz_time().count() > 0 ? 20 : 3;
  for (unsigned i = 0; i < times && !::testing::Test::HasFailure(); ++i) {
    hit_a_rank(SIGKILL, seed + i);
    hit_a_rank(SIGSTOP, seed + i);
  }
}

}  // namespace
}  // namespace fsdp2::testing::shm_failures
