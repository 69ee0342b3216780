// What the collectives of backend "shm" compute, through c10d's interface: every one of them, on
// sizes that do not divide and that pass through the shared memory in several rounds.

#include "support/collective_checks.h"
#include "support/errors.h"
#include "support/shm_ranks.h"

#include <fsdp2/process_group.h>

#include <torch/torch.h>

#include <cmath>
#include <gtest/gtest.h>
#include <limits>

namespace fsdp2::testing::shm_backend {
namespace {

using c10d::ReduceOp;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

c10::intrusive_ptr<c10d::Backend> backend() {
  const auto backend = world_group()->getBackend(c10::kCPU);
  EXPECT_EQ(backend->getBackendName(), "shm");
  return backend;
}

// In elements; a round is 65536 floats to all, or that shared among the ranks.
const int64_t kSizes[] = {0, 1, 7, 1023, 16384, 65537, 200'003, 1'000'001};

class ShmMoves : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmMoves, ::testing::Values(1, 2, 3, 4));

TEST_P(ShmMoves, AllGather) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const auto type : {at::kByte, at::kFloat, at::kBFloat16, at::kComplexDouble}) {
      for (const int64_t size : kSizes) {
        check_all_gather(*backend(), size, type);
        Tensors parts;
        for (int other = 0; other < world; ++other) parts.push_back(brought(other, size, type));
        std::vector<Tensors> outputs(1);
        for (int other = 0; other < world; ++other)
          outputs[0].push_back(torch::full({size}, 9, type));
        Tensors inputs = {parts[rank].clone()};
        backend()->allgather(outputs, inputs)->wait();
        expect_same_bits(torch::cat(outputs[0]), torch::cat(parts), "all_gather of a list");
      }
    }
  });
}

TEST_P(ShmMoves, BroadcastFromEveryRoot) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const int64_t size : kSizes) {
      for (int root = 0; root < world; ++root) {
        Tensors tensors = {brought(rank, size, at::kInt)};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        backend()->broadcast(tensors, options)->wait();
        expect_same_bits(tensors[0], brought(root, size, at::kInt), "broadcast");
      }
    }
  });
}

TEST_P(ShmMoves, ScatterAndGather) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const int64_t size : kSizes) {
      for (int root = 0; root < world; ++root) {
        std::vector<Tensors> lists;
        if (rank == root) {
          lists.emplace_back();
          for (int other = 0; other < world; ++other)
            lists[0].push_back(brought(other + root, size, at::kHalf));
        }
        Tensors output = {torch::full({size}, 9, at::kHalf)};
        c10d::ScatterOptions options;
        options.rootRank = root;
        backend()->scatter(output, lists, options)->wait();
        expect_same_bits(output[0], brought(rank + root, size, at::kHalf), "scatter");

        Tensors input = {brought(rank, size, at::kBool)};
        if (rank == root) {
          for (Tensor& tensor : lists[0]) tensor = torch::zeros({size}, at::kBool);
        }
        c10d::GatherOptions gather_options;
        gather_options.rootRank = root;
        backend()->gather(lists, input, gather_options)->wait();
        for (int other = 0; rank == root && other < world; ++other)
          expect_same_bits(lists[0][other], brought(other, size, at::kBool), "gather");
      }
    }
  });
}

TEST_P(ShmMoves, AllToAllEvenAndUneven) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const int64_t size : kSizes) {
      // From rank a to rank b; even, uneven, and mostly nothing.
      for (int form = 0; form < 3; ++form) {
        const auto amount = [&](int from, int to) -> int64_t {
          if (form == 0) return size;
          if (form == 1) return size * (from + 1) / (to + 1);
          return from == 0 && to == world - 1 ? size : 0;
        };
        const auto sent = [&](int from, int to) {
          return brought(from * world + to, amount(from, to), at::kFloat);
        };
        std::vector<int64_t> input_splits, output_splits;
        Tensors inputs, wanted, outputs;
        for (int other = 0; other < world; ++other) {
          inputs.push_back(sent(rank, other));
          wanted.push_back(sent(other, rank));
          outputs.push_back(torch::full_like(wanted.back(), 99));
          input_splits.push_back(inputs.back().numel());
          output_splits.push_back(wanted.back().numel());
        }
        Tensor input = torch::cat(inputs), output = torch::full_like(torch::cat(wanted), 99);
        if (form == 0) input_splits = output_splits = {};
        backend()->alltoall_base(output, input, output_splits, input_splits)->wait();
        expect_same_bits(output, torch::cat(wanted), "all_to_all");
        backend()->alltoall(outputs, inputs)->wait();
        expect_same_bits(torch::cat(outputs), torch::cat(wanted), "all_to_all of lists");
      }
    }
  });
}

TEST_P(ShmMoves, ListsOfTensorsAtOnce) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    Tensors inputs = {brought(rank, 5, at::kFloat), brought(rank, 70'000, at::kLong)};
    Tensors outputs = {torch::zeros({int64_t{5} * world}),
                       torch::zeros({int64_t{70'000} * world}, at::kLong)};
    std::vector<Tensors> by_rank(world, {torch::zeros({5}), torch::zeros({70'000}, at::kLong)});
    for (Tensors& list : by_rank) {
      for (Tensor& tensor : list) tensor = tensor.clone();
    }
    backend()->allgather_into_tensor_coalesced(outputs, inputs)->wait();
    backend()->allgather_coalesced(by_rank, inputs)->wait();
    for (int other = 0; other < world; ++other) {
      for (size_t i = 0; i < 2; ++i) {
        const int64_t size = inputs[i].numel();
        const Tensor wanted = brought(other, size, inputs[i].scalar_type());
        expect_same_bits(outputs[i].narrow(0, other * size, size), wanted, "all_gather");
        expect_same_bits(by_rank[other][i], wanted, "all_gather");
      }
    }
    Tensors sums = {torch::full({3}, rank + 1.0), torch::full({2}, rank, at::kDouble)};
    backend()->allreduce_coalesced(sums)->wait();
    EXPECT_TRUE(sums[0].equal(torch::full({3}, world * (world + 1) / 2.0)));
    EXPECT_TRUE(sums[1].equal(torch::full({2}, world * (world - 1) / 2.0, at::kDouble)));
    Tensors parts = {torch::zeros({2}), torch::zeros({1})};
    Tensors wholes = {torch::arange(2.0 * world), torch::arange(1.0 * world)};
    backend()->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    EXPECT_TRUE(parts[0].equal(torch::tensor({2.0 * rank, 2.0 * rank + 1}).to(at::kFloat) * world));
    EXPECT_TRUE(parts[1].equal(torch::full({1}, rank * world, at::kFloat)));
    backend()->barrier()->wait();
    backend()->monitoredBarrier({});
  });
}

class ShmReductions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmReductions, ::testing::Values(1, 2, 3, 4));

/// All reductions of it, to the bit.
void check_all_reductions(int world, int rank, const Tensors& inputs, RedOp op) {
  const Tensor wanted = reduced(inputs, op);
  check_reductions(*backend(), inputs, wanted, op);
  const std::string what = "op " + std::to_string(op);
  c10d::ReduceOptions root_options;
  root_options.reduceOp = op;
  root_options.rootRank = world - 1;
  Tensors one = {inputs[rank].clone()};
  backend()->reduce(one, root_options)->wait();
  expect_same_bits(one[0], rank == world - 1 ? wanted : inputs[rank], "reduce, " + what);

  const int64_t each = wanted.numel() / world;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  const Tensor input = inputs[rank].narrow(0, 0, each * world);
  std::vector<Tensors> list = {input.chunk(world)};
  if (each == 0) list[0].assign(world, input);
  Tensors outputs = {torch::zeros({each}, input.options())};
  backend()->reduce_scatter(outputs, list, options)->wait();
  expect_same_bits(outputs[0], wanted.narrow(0, each * rank, each),
                   "reduce_scatter of a list, " + what);
}

TEST_P(ShmReductions, SumsAndAveragesOfEverySize) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
      for (const int64_t size : kSizes) {
        Tensors inputs;
        for (int other = 0; other < world; ++other)
          inputs.push_back(random_values(other, size, type));
        check_all_reductions(world, rank, inputs, ReduceOp::SUM);
        check_all_reductions(world, rank, inputs, ReduceOp::AVG);
      }
    }
  });
}

TEST_P(ShmReductions, EveryOpOfEveryDtype) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort,
                            at::kChar, at::kByte, at::kBool, at::kComplexDouble}) {
      for (int op = ReduceOp::SUM; op < ReduceOp::PREMUL_SUM; ++op) {
        const auto typed = static_cast<ReduceOp::RedOpType>(op);
        c10d::AllreduceOptions options;
        options.reduceOp = typed;
        Tensors tensors = {brought(rank, 3, type)};
        const std::string error = error_of([&] { backend()->allreduce(tensors, options)->wait(); });
        const bool makes_sense = can_be_reduced(type, typed);
        EXPECT_EQ(error.empty(), makes_sense) << op << ' ' << type << ": " << error;
        if (!makes_sense) {
          EXPECT_NE(error.find("cannot be made"), std::string::npos) << error;
          continue;
        }
        Tensors inputs;
        for (int other = 0; other < world; ++other) inputs.push_back(brought(other, 70'001, type));
        check_all_reductions(world, rank, inputs, typed);
      }
    }
  });
}

TEST_P(ShmReductions, PremultipliedSums) {
  on_shm_ranks(GetParam(), [](int) {
    for (const int64_t size : {3, 100'000}) check_premultiplied_sums(*backend(), size);
  });
}

TEST(ShmReductionsOfTwo, NarrowFloatsAreRoundedOnceAndNaNsStay) {
  on_shm_ranks(2, [](int rank) {
    const float inf = std::numeric_limits<float>::infinity();
    for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat}) {
      Tensors tensors = {
          rank == 0 ? torch::tensor({1.0f, inf, inf, NAN, 3e38f, 1e-40f, -0.0f}).to(type)
                    : torch::tensor({2e-9f, inf, -inf, 1.0f, 3e38f, 1e-40f, -0.0f}).to(type)};
      const Tensor mine = tensors[0].to(at::kFloat).clone();
      backend()->allreduce(tensors)->wait();
      EXPECT_EQ(tensors[0][0].item<float>(), 1.0f);
      EXPECT_EQ(tensors[0][1].item<float>(), inf);
      EXPECT_TRUE(std::isnan(tensors[0][2].item<float>()));
      EXPECT_TRUE(std::isnan(tensors[0][3].item<float>()));
      EXPECT_EQ(tensors[0][4].item<float>(), inf);
      EXPECT_EQ(tensors[0][5].item<float>(), (mine[5] + mine[5]).to(type).item<float>());
      EXPECT_TRUE(std::signbit(tensors[0][6].item<float>()));
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::shm_backend
