// What the collectives of backend "shm" compute, through c10d's interface: every one of them, on
// sizes that do not divide and that pass through the shared memory in several rounds.

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

/// What rank `rank` brings: other values at every place and rank, small enough to be exact.
Tensor brought(int rank, int64_t size, at::ScalarType type) {
  const Tensor values = (torch::arange(size, at::kLong) * 7 + rank * 3) % 11 - rank % 2;
  return type == at::kBool ? values.gt(4) : values.to(type);
}

// In elements; a round is 65536 floats to all, or that shared among the ranks.
const int64_t kSizes[] = {0, 1, 7, 1023, 16384, 65537, 200'003, 1'000'001};

class ShmMoves : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmMoves, ::testing::Values(1, 2, 3, 4));

void expect_same(const Tensor& got, const Tensor& wanted, const std::string& what) {
  EXPECT_TRUE(
      at::equal(got.view({-1}).view(at::kByte), wanted.contiguous().view({-1}).view(at::kByte)))
      << what << " of " << wanted.numel() << " x " << wanted.scalar_type() << " on rank "
      << get_rank();
}

TEST_P(ShmMoves, AllGather) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const auto type : {at::kByte, at::kFloat, at::kBFloat16, at::kComplexDouble}) {
      for (const int64_t size : kSizes) {
        Tensors parts;
        for (int other = 0; other < world; ++other) parts.push_back(brought(other, size, type));
        Tensor input = parts[rank].clone();
        Tensor output = torch::full({world * size}, 9, type);
        backend()->_allgather_base(output, input)->wait();
        expect_same(output, torch::cat(parts), "all_gather");
        // Into separate tensors, and from a part of the output itself.
        std::vector<Tensors> outputs(1);
        for (int other = 0; other < world; ++other)
          outputs[0].push_back(torch::full({size}, 9, type));
        Tensors inputs = {input};
        backend()->allgather(outputs, inputs)->wait();
        expect_same(torch::cat(outputs[0]), torch::cat(parts), "all_gather of a list");
        Tensor whole = torch::full({world, size}, 9, type);
        Tensor own = whole[rank].copy_(input);
        backend()->_allgather_base(whole, own)->wait();
        expect_same(whole, torch::cat(parts), "all_gather in place");
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
        expect_same(tensors[0], brought(root, size, at::kInt), "broadcast");
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
        expect_same(output[0], brought(rank + root, size, at::kHalf), "scatter");

        Tensors input = {brought(rank, size, at::kBool)};
        if (rank == root) {
          for (Tensor& tensor : lists[0]) tensor = torch::zeros({size}, at::kBool);
        }
        c10d::GatherOptions gather_options;
        gather_options.rootRank = root;
        backend()->gather(lists, input, gather_options)->wait();
        for (int other = 0; rank == root && other < world; ++other)
          expect_same(lists[0][other], brought(other, size, at::kBool), "gather");
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
        expect_same(output, torch::cat(wanted), "all_to_all");
        backend()->alltoall(outputs, inputs)->wait();
        expect_same(torch::cat(outputs), torch::cat(wanted), "all_to_all of lists");
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
        expect_same(outputs[i].narrow(0, other * size, size), wanted, "all_gather");
        expect_same(by_rank[other][i], wanted, "all_gather");
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

/// By ATen, in one process; fp16 and bf16 summed in fp32 and rounded once.
Tensor reduced(const Tensors& inputs, ReduceOp::RedOpType op) {
  const at::ScalarType type = inputs[0].scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  const auto input = [&](size_t rank) {
    return narrow ? inputs[rank].to(at::kFloat) : inputs[rank];
  };
  Tensor result = input(0).clone();
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const Tensor next = input(rank);
    if (op == ReduceOp::SUM || op == ReduceOp::AVG) result = result + next;
    if (op == ReduceOp::PRODUCT) result = result * next;
    if (op == ReduceOp::MIN) result = at::minimum(result, next);
    if (op == ReduceOp::MAX) result = at::maximum(result, next);
    if (op == ReduceOp::BAND) result = at::bitwise_and(result, next);
    if (op == ReduceOp::BOR) result = at::bitwise_or(result, next);
    if (op == ReduceOp::BXOR) result = at::bitwise_xor(result, next);
  }
  // ATen divides complex numbers by complex ones, which rounds differently.
  const Tensor parts = result.is_complex() ? at::view_as_real(result) : result;
  if (op == ReduceOp::AVG) parts.div_(static_cast<double>(inputs.size()));
  return result.to(type);
}

/// Not exact in any sum, so that the order of additions shows.
Tensor random_values(int rank, int64_t size, at::ScalarType type) {
  torch::manual_seed(static_cast<uint64_t>(size + rank));
  return torch::randn({size}, at::isComplexType(type) ? at::kComplexDouble : at::kDouble).to(type);
}

class ShmReductions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ShmReductions, ::testing::Values(1, 2, 3, 4));

/// All three reductions of it against `wanted`, to the bit.
void check_reductions(int world, int rank, const Tensors& inputs, ReduceOp::RedOpType op) {
  const Tensor wanted = reduced(inputs, op);
  const std::string what = "op " + std::to_string(op);
  c10d::AllreduceOptions all_options;
  all_options.reduceOp = op;
  Tensors all = {inputs[rank].clone()};
  backend()->allreduce(all, all_options)->wait();
  expect_same(all[0], wanted, "all_reduce, " + what);

  c10d::ReduceOptions root_options;
  root_options.reduceOp = op;
  root_options.rootRank = world - 1;
  Tensors one = {inputs[rank].clone()};
  backend()->reduce(one, root_options)->wait();
  expect_same(one[0], rank == world - 1 ? wanted : inputs[rank], "reduce, " + what);

  const int64_t each = wanted.numel() / world;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  Tensor input = inputs[rank].narrow(0, 0, each * world).clone();
  Tensor output = torch::zeros({each}, input.options());
  backend()->_reduce_scatter_base(output, input, options)->wait();
  expect_same(output, wanted.narrow(0, each * rank, each), "reduce_scatter, " + what);
  expect_same(input, inputs[rank].narrow(0, 0, each * world), "the input");
  std::vector<Tensors> list = {input.chunk(world)};
  if (each == 0) list[0].assign(world, input);
  Tensors outputs = {torch::zeros_like(output)};
  backend()->reduce_scatter(outputs, list, options)->wait();
  expect_same(outputs[0], output, "reduce_scatter of a list, " + what);
  Tensor own = input.narrow(0, each * rank, each);
  backend()->_reduce_scatter_base(own, input, options)->wait();
  expect_same(own, output, "reduce_scatter in place, " + what);
}

TEST_P(ShmReductions, SumsAndAveragesOfEverySize) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
      for (const int64_t size : kSizes) {
        Tensors inputs;
        for (int other = 0; other < world; ++other)
          inputs.push_back(random_values(other, size, type));
        check_reductions(world, rank, inputs, ReduceOp::SUM);
        check_reductions(world, rank, inputs, ReduceOp::AVG);
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
        const bool whole = at::isIntegralType(type, true);
        const bool makes_sense = op == ReduceOp::AVG    ? !whole
                                 : op >= ReduceOp::BAND ? whole
                                 : op >= ReduceOp::MIN  ? !at::isComplexType(type)
                                                        : true;
        EXPECT_EQ(error.empty(), makes_sense) << op << ' ' << type << ": " << error;
        if (!makes_sense) {
          EXPECT_NE(error.find("cannot be made"), std::string::npos) << error;
          continue;
        }
        Tensors inputs;
        for (int other = 0; other < world; ++other) inputs.push_back(brought(other, 70'001, type));
        check_reductions(world, rank, inputs, typed);
      }
    }
  });
}

TEST_P(ShmReductions, PremultipliedSums) {
  const int world = GetParam();
  on_shm_ranks(world, [world](int rank) {
    double factors = 0;
    for (int other = 0; other < world; ++other) factors += other + 2;
    for (const int64_t size : {3, 100'000}) {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::makePreMulSum(rank + 2.0);
      Tensors tensors = {torch::full({size}, 3.0)};
      backend()->allreduce(tensors, options)->wait();
      EXPECT_TRUE(tensors[0].equal(torch::full({size}, 3 * factors)));
      c10d::ReduceScatterOptions scatter;
      scatter.reduceOp = c10d::makePreMulSum(torch::full({1}, rank + 2.0));
      Tensor input = torch::full({size * world}, 3.0), output = torch::zeros({size});
      backend()->_reduce_scatter_base(output, input, scatter)->wait();
      EXPECT_TRUE(output.equal(torch::full({size}, 3 * factors)));
      EXPECT_TRUE(input.equal(torch::full({size * world}, 3.0)));
    }
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
