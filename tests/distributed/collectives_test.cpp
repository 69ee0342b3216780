#include "support/errors.h"
#include "support/ranks.h"

#include <fsdp2/collectives.h>

#include <torch/torch.h>

#include <chrono>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace fsdp2 {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

/// Element i of what rank `rank` contributes.
torch::Tensor contribution(int rank, int64_t size, at::ScalarType type) {
  return (torch::arange(size, at::kFloat) % 7 + rank + 1).to(type);
}

class Collectives : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, ::testing::Values(1, 2, 3, 4));

TEST_P(Collectives, AllGatherConcatenatesInRankOrderForEveryDtype) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    for (const auto type :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kShort, at::kBool,
          at::kByte, at::kComplexFloat, at::kFloat8_e4m3fn}) {
      const auto input = contribution(rank, 5, type);
      const auto output = torch::zeros({world * 5}, at::kFloat).to(type);
      wait(all_gather_single(output, input, world_group()));
      for (int other = 0; other < world; ++other) {
        const auto part = output.slice(0, other * 5, other * 5 + 5).to(at::kComplexDouble);
        EXPECT_TRUE(part.equal(contribution(other, 5, type).to(at::kComplexDouble)))
            << toString(type);
      }
    }
  });
}

TEST_P(Collectives, AllGatherIntoAViewThatHoldsItsOwnInput) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    const auto output = torch::zeros({world, 3});
    const auto input = output.select(0, rank).fill_(rank + 1);
    wait(all_gather_single(output, input, world_group()));
    for (int other = 0; other < world; ++other)
      EXPECT_EQ(output[other].sum().item<float>(), 3 * (other + 1));
  });
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsPartOfTheReduction) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    for (const auto type :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kComplexFloat}) {
      const auto input = contribution(rank, world * 3, type);
      const auto before = input.clone();
      const auto output = torch::zeros({3}, type);
      wait(reduce_scatter_single(output, input, ReduceOp::kSum, world_group()));
      auto expected = torch::zeros({world * 3}, type);
      for (int other = 0; other < world; ++other) expected += contribution(other, world * 3, type);
      EXPECT_TRUE(output.equal(expected.slice(0, rank * 3, rank * 3 + 3))) << toString(type);
      EXPECT_TRUE(input.equal(before)) << "the input changed, " << toString(type);
    }
  });
}

TEST_P(Collectives, AverageDividesExactlyOnce) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      // The public case: gradients rank * 3 + 3 average to 4.5 on two ranks and 7.5 on four.
      const auto gradient = torch::full({3, 4}, 3.0 * (rank + 1), type);
      const double mean = 3.0 * (world + 1) / 2;
      const auto reduced = gradient.clone();
      const Work work = all_reduce(reduced, ReduceOp::kAvg, world_group());
      wait(work);
      wait(work);
      EXPECT_TRUE(reduced.equal(torch::full({3, 4}, mean, type))) << reduced;

      const auto part = torch::zeros({2}, type);
      wait(reduce_scatter_single(part, torch::full({2 * world}, 3.0 * (rank + 1), type),
                                 ReduceOp::kAvg, world_group()));
      EXPECT_TRUE(part.equal(torch::full({2}, mean, type))) << part;
    }
  });
}

TEST_P(Collectives, AverageOfAParameterNeedsNoGuardAndLeavesItsVersion) {
  on_ranks(GetParam(), [](int) {
    const auto parameter = torch::ones({3}, torch::requires_grad());
    const auto loss = (parameter * parameter).sum();
    wait(all_reduce(parameter, ReduceOp::kAvg, world_group()));
    loss.backward();
    EXPECT_TRUE(parameter.grad().equal(torch::full({3}, 2.0)));
  });
}

TEST_P(Collectives, MaxMinAndProduct) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    const auto reduced = [&](ReduceOp op) {
      const auto tensor = torch::full({2}, rank + 1.0);
      wait(all_reduce(tensor, op, world_group()));
      return tensor[1].item<double>();
    };
    double product = 1;
    for (int other = 0; other < world; ++other) product *= other + 1;
    EXPECT_EQ(reduced(ReduceOp::kMax), world);
    EXPECT_EQ(reduced(ReduceOp::kMin), 1);
    EXPECT_EQ(reduced(ReduceOp::kProduct), product);
  });
}

TEST_P(Collectives, BroadcastFromEverySource) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    for (int source = 0; source < world; ++source) {
      const auto tensor = torch::full({3}, rank + 1, at::kBFloat16);
      const auto scalar = torch::tensor(rank % 2 == 0);
      wait(broadcast(tensor, source, world_group()));
      wait(broadcast(scalar, source, world_group()));
      EXPECT_TRUE(tensor.equal(torch::full({3}, source + 1, at::kBFloat16)));
      EXPECT_EQ(scalar.item<bool>(), source % 2 == 0);
    }
  });
}

TEST_P(Collectives, BytesOfUnequalLengths) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    // Lengths 0, 3, 6 and 9, with a zero inside.
    const auto bytes = [](int of) {
      std::string text;
      for (int i = 0; i < of; ++i) text.append("a\0b", 3);
      return text;
    };
    const auto all = all_gather_bytes(bytes(rank), world_group());
    ASSERT_EQ(all.size(), static_cast<size_t>(world));
    for (int other = 0; other < world; ++other) EXPECT_EQ(all[other], bytes(other));
    EXPECT_EQ(all_gather_bytes("", world_group()), std::vector<std::string>(world));
  });
}

TEST_P(Collectives, EmptyTensorsAndBarriers) {
  on_ranks(GetParam(), [](int) {
    const auto none = torch::empty({0});
    wait(all_gather_single(none, none, world_group()));
    wait(reduce_scatter_single(none, none, ReduceOp::kAvg, world_group()));
    wait(all_reduce(none, ReduceOp::kSum, world_group()));
    wait(barrier(world_group()));
    wait(Work());
  });
}

TEST_P(Collectives, CountsWhatIsSent) {
  const int world = GetParam();
  on_ranks(world, [world](int) {
    reset_collective_counts();
    const auto small = torch::ones({4}), large = torch::ones({4 * world});
    wait(all_gather_single(large, small, world_group()));
    wait(reduce_scatter_single(small, large, ReduceOp::kSum, world_group()));
    wait(all_reduce(small, ReduceOp::kSum, world_group()));
    wait(broadcast(small, 0, world_group()));
    wait(barrier(world_group()));
    const CollectiveCounts counts = collective_counts();
    const int64_t sent = world > 1;  // one rank sends nothing
    EXPECT_EQ(counts.all_gathers, sent);
    EXPECT_EQ(counts.reduce_scatters, sent);
    EXPECT_EQ(counts.all_reduces, sent);
    EXPECT_EQ(counts.broadcasts, sent);
    EXPECT_EQ(counts.others, sent);
    EXPECT_EQ(counts.bytes, sent * 4 * (2 * 4 * world + 2 * 4));
    reset_collective_counts();
    EXPECT_EQ(collective_counts().bytes, 0);
  });
}

TEST_P(Collectives, RefusesWrongTensorsBeforeAnythingIsSent) {
  const int world = GetParam();
  on_ranks(world, [world](int) {
    const ProcessGroup group = world_group();
    const auto small = torch::ones({4}), large = torch::ones({4 * world});
    reset_collective_counts();
    EXPECT_THAT(
        error_of([&] { all_gather_single(torch::ones({4 * world + 1}), small, group); }),
        AllOf(HasSubstr("all_gather_single in group 'world' on rank"), HasSubstr("`output` has")));
    EXPECT_THAT(error_of([&] { all_gather_single(large, small.to(at::kDouble), group); }),
                HasSubstr("`output` is Float but `input` is Double"));
    EXPECT_THAT(
        error_of([&] { reduce_scatter_single(small, torch::ones({1, 3}), ReduceOp::kSum, group); }),
        HasSubstr("`input` has 3 elements"));
    EXPECT_THAT(error_of([&] { all_reduce(torch::ones({2, 3}).t(), ReduceOp::kSum, group); }),
                HasSubstr("`tensor` is not contiguous"));
    EXPECT_THAT(error_of([&] { all_reduce(torch::Tensor(), ReduceOp::kSum, group); }),
                HasSubstr("`tensor` is undefined"));
    EXPECT_THAT(
        error_of([&] { all_reduce(torch::ones({2, 2}).to_sparse(), ReduceOp::kSum, group); }),
        HasSubstr("not a plain dense tensor"));
    EXPECT_THAT(error_of([&] { all_reduce(torch::ones({2}, at::kBool), ReduceOp::kSum, group); }),
                HasSubstr("cannot reduce Bool"));
    EXPECT_THAT(error_of([&] { all_reduce(torch::ones({2}, at::kLong), ReduceOp::kAvg, group); }),
                HasSubstr("kAvg of Long"));
    EXPECT_THAT(error_of([&] { broadcast(small, world, group); }), HasSubstr("`source` is"));
    EXPECT_THAT(error_of([&] { broadcast(small, 0, nullptr); }), HasSubstr("the group is null"));
    EXPECT_EQ(collective_counts().bytes, 0);
    wait(barrier(group));
  });
}

TEST(CollectiveFailures, ATimeoutNamesCollectiveGroupAndRank) {
  on_ranks(2, [](int rank) {
    const ProcessGroup pair = new_group({0, 1}, "pair", std::chrono::milliseconds(300));
    if (rank == 1) {  // never calls it
      wait(barrier(world_group()));
      return;
    }
    const auto error =
        error_of([&] { wait(all_reduce(torch::ones({3}), ReduceOp::kAvg, pair), "the norm"); });
    EXPECT_THAT(error, AllOf(HasSubstr("all_reduce of 3 x Float in group 'pair' on rank 0 of 2"),
                             HasSubstr("timed out after"), HasSubstr("in the norm")));
    wait(barrier(world_group()));
  });
}

TEST(CollectiveFailures, ARankThatDiesIsAnErrorOnTheOthers) {
  on_ranks(3, [](int rank) {
    wait(barrier(world_group()));
    if (rank == 1) _exit(0);
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] {
      for (int step = 0; step < 3; ++step)
        wait(all_reduce(torch::ones({3}), ReduceOp::kSum, world_group()));
    });
    EXPECT_THAT(error, AllOf(HasSubstr("all_reduce of 3 x Float in group 'world'"),
                             HasSubstr("failed after")));
    EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(5));
  });
}

TEST_P(Collectives, ScatterSendsEachRankItsPart) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kBool, at::kComplexFloat}) {
      for (int source = 0; source < world; ++source) {
        const auto input = contribution(source, world * 5, type);
        const auto output = torch::zeros({5}, at::kFloat).to(type);
        wait(scatter(output, rank == source ? input : torch::Tensor(), source, world_group()));
        EXPECT_TRUE(output.to(at::kComplexDouble)
                        .equal(input.slice(0, rank * 5, rank * 5 + 5).to(at::kComplexDouble)));
      }
    }
    reset_collective_counts();
    const auto none = torch::zeros({0});
    wait(scatter(none, rank == 0 ? none : torch::Tensor(), 0, world_group()));
    EXPECT_EQ(collective_counts().scatters, 0);
    const auto own = torch::zeros({2});
    EXPECT_THAT(error_of([&] { scatter(own, torch::zeros({5}), rank, world_group()); }),
                AllOf(HasSubstr("scatter"), HasSubstr("it needs")));
    EXPECT_THAT(error_of([&] { scatter(own, own, world, world_group()); }), HasSubstr("`source`"));
    if (world > 1) {
      EXPECT_THAT(error_of([&] { scatter(own, own, (rank + 1) % world, world_group()); }),
                  HasSubstr("gives `input`"));
    }
  });
}

TEST_P(Collectives, AllToAllExchangesUnevenRuns) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    // Rank r sends r + 2 * other elements to the other; some send and some get nothing.
    for (const bool sparse : {false, true}) {
      const auto amount = [&](int from, int to) {
        return sparse ? (from == 0 && to == world - 1 ? 3 : 0) : from + 2 * to;
      };
      for (const auto type : {at::kFloat, at::kHalf, at::kBool, at::kComplexDouble}) {
        std::vector<int64_t> sent, received;
        std::vector<torch::Tensor> input, expected;
        for (int other = 0; other < world; ++other) {
          sent.push_back(amount(rank, other));
          received.push_back(amount(other, rank));
          input.push_back(torch::full({sent.back()}, 10 * rank + other).to(type));
          expected.push_back(torch::full({received.back()}, 10 * other + rank).to(type));
        }
        const auto wanted = torch::cat(expected);
        const auto output = torch::zeros_like(wanted);
        wait(all_to_all_single(output, torch::cat(input), received, sent, world_group()));
        EXPECT_TRUE(output.to(at::kComplexDouble).equal(wanted.to(at::kComplexDouble)));
      }
    }
    const auto tensor = torch::zeros({world});
    const std::vector<int64_t> ones(world, 1), twos(world, 2);
    EXPECT_THAT(error_of([&] { all_to_all_single(tensor, tensor, ones, twos, world_group()); }),
                AllOf(HasSubstr("all_to_all_single"), HasSubstr("input_splits")));
    EXPECT_THAT(
        error_of([&] { all_to_all_single(tensor, tensor, {1, 2, 3, 4, 5}, ones, world_group()); }),
        HasSubstr("output_splits"));
  });
}

}  // namespace
}  // namespace fsdp2
