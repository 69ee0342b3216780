// Every layout to every other, against the whole tensor.
#include "support/ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <algorithm>
#include <gtest/gtest.h>
#include <vector>

namespace fsdp2 {
namespace {

using torch::Tensor;

/// All combinations of `choices`, one a mesh dimension.
std::vector<Placements> layouts(int64_t ndim, const std::vector<Placement>& choices) {
  std::vector<Placements> all = {{}};
  for (int64_t i = 0; i < ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& each : all) {
      for (const Placement& choice : choices) {
        longer.push_back(each);
        longer.back().push_back(choice);
      }
    }
    all = longer;
  }
  return all;
}

/// What this rank must hold of `whole`.
Tensor own_part(const Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  Tensor part = whole;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    if (!placements[i].is_shard()) continue;
    const auto chunks = part.chunk(mesh.size(i), placements[i].dim());
    const int64_t index = mesh.get_local_rank(i);
    part = index < static_cast<int64_t>(chunks.size()) ? chunks[index]
                                                       : part.narrow(placements[i].dim(), 0, 0);
  }
  return part;
}

void all_pairs(const DeviceMesh& mesh, const Tensor& whole) {
  std::vector<Placement> choices = {Replicate()};
  for (int64_t dim = 0; dim < whole.dim(); ++dim) choices.push_back(Shard(dim));
  const auto all = layouts(mesh.ndim(), choices);
  for (const Placements& from : all) {
    const DTensor start = chunk_tensor(whole, mesh, from);
    ASSERT_TRUE(torch::equal(start.to_local(), own_part(whole, mesh, from))) << to_string(from);
    ASSERT_TRUE(torch::equal(start.full_tensor(), whole)) << to_string(from);
    for (const Placements& to : all) {
      const DTensor moved = start.redistribute(to);
      ASSERT_EQ(moved.placements(), to);
      ASSERT_EQ(moved.sizes(), whole.sizes());
      ASSERT_TRUE(torch::equal(moved.to_local(), own_part(whole, mesh, to)))
          << to_string(from) << " to " << to_string(to) << " of " << whole.sizes();
    }
  }
}

TEST(Redistribute, AllPairsOneDimension) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      all_pairs(mesh, torch::arange(35).view({7, 5}).to(torch::kFloat));
      all_pairs(mesh, torch::arange(2).view({1, 2}) > 0);
      all_pairs(mesh,
                torch::randn({5, 2, 3}).add(1).mul(0).add(torch::arange(3)).to(torch::kBFloat16));
      all_pairs(mesh, torch::zeros({0, 3}));
      all_pairs(mesh, torch::tensor(3.5));
    });
  }
}

TEST(Redistribute, AllPairsTwoDimensions) {
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    all_pairs(mesh, torch::arange(35).view({7, 5}).to(torch::kDouble));
    all_pairs(mesh, torch::arange(3).view({1, 3}));
  });
}

TEST(Redistribute, AllPairsThreeDimensions) {
  testing::on_ranks(4, [](int) {
    all_pairs(init_device_mesh("cpu", {2, 1, 2}, {"a", "b", "c"}), torch::arange(15).view({5, 3}));
  });
}

/// Rank r holds r + 1 times `whole`; what each reduction must make of it.
Tensor reduced(const Tensor& whole, int64_t ranks, const std::string& op) {
  Tensor stacked = torch::stack(std::vector<Tensor>(ranks, whole));
  for (int64_t r = 0; r < ranks; ++r) stacked[r].mul_(r + 1);
  if (op == "sum") return stacked.sum(0);
  if (op == "avg") return stacked.mean(0);
  if (op == "max") return stacked.amax(0);
  if (op == "min") return stacked.amin(0);
  return stacked.prod(0);
}

TEST(Redistribute, PartialIsReduced) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Tensor whole = torch::arange(15).view({5, 3}).sub(7).to(torch::kFloat);
      for (const char* op : {"sum", "avg", "max", "min", "product"}) {
        const DTensor partial = DTensor::from_local(whole * (rank + 1), mesh, {Partial(op)});
        const Tensor expected = reduced(whole, world, op);
        EXPECT_TRUE(torch::allclose(partial.full_tensor(), expected, 1e-6)) << op;
        for (int64_t dim : {0, 1, -1}) {
          const DTensor shard = partial.redistribute({Shard(dim)});
          EXPECT_TRUE(torch::allclose(shard.to_local(),
                                      own_part(expected, mesh, {Shard(dim < 0 ? 1 : dim)}), 1e-6))
              << op << " to " << dim;
        }
      }
    });
  }
}

TEST(Redistribute, PartialOverTwoDimensions) {
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    const Tensor whole = torch::arange(15).view({5, 3}).to(torch::kFloat);
    const DTensor both = DTensor::from_local(whole * (rank + 1), mesh, {Partial(), Partial("avg")});
    const Tensor expected = whole * 5;  // (1+2)/2 + (3+4)/2
    for (const Placements& to : layouts(2, {Replicate(), Shard(0), Shard(1)})) {
      EXPECT_TRUE(torch::equal(both.redistribute(to).to_local(), own_part(expected, mesh, to)))
          << to_string(to);
    }
    // A Shard inside a Partial, both of dimension 0.
    const Tensor part =
        own_part(whole, mesh, {Replicate(), Shard(0)}) * (mesh.get_local_rank(0) + 1);
    const DTensor mixed =
        DTensor::from_local(part, mesh, {Partial(), Shard(0)}, std::vector<int64_t>{5, 3});
    for (const Placements& to : layouts(2, {Replicate(), Shard(0), Shard(1)})) {
      EXPECT_TRUE(torch::equal(mixed.redistribute(to).to_local(), own_part(whole * 3, mesh, to)))
          << to_string(to);
    }
  });
}

// An averaging reduction that a backend does not have must not come back as a sum, nor must padding
// enter it.
TEST(Redistribute, AverageIsAnAverage) {
  for (int world : {2, 4}) {
    testing::on_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const double expected = world == 2 ? 4.5 : 7.5;
      for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
        const Tensor weight = torch::ones({3, 4}, torch::dtype(dtype).requires_grad(true));
        const Tensor input = torch::full({3, 4}, rank + 1, torch::dtype(dtype));
        torch::nn::functional::linear(input, weight).sum().backward();
        const DTensor grad = DTensor::from_local(weight.grad(), mesh, {Partial("avg")});
        const Tensor whole = torch::full({3, 4}, expected, torch::dtype(dtype));
        EXPECT_TRUE(torch::equal(grad.redistribute({Replicate()}).to_local(), whole));
        EXPECT_TRUE(torch::equal(grad.redistribute({Shard(0)}).to_local(),
                                 own_part(whole, mesh, {Shard(0)})));
        EXPECT_TRUE(torch::equal(grad.redistribute({Shard(0)}).full_tensor(), whole));
      }
    });
  }
}

TEST(Redistribute, ToPartialIsRefused) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const DTensor whole = chunk_tensor(torch::ones({3}), mesh, {Replicate()});
    EXPECT_THROW(whole.redistribute({Partial()}), c10::ValueError);
    EXPECT_THROW(whole.redistribute({Shard(1)}), c10::IndexError);
    EXPECT_THROW(whole.redistribute({Shard(0), Shard(0)}), c10::ValueError);
  });
}

TEST(Redistribute, ResultsAreFreshMemory) {
  testing::on_ranks(1, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1});
    const DTensor shard = chunk_tensor(torch::ones({3}), mesh, {Shard(0)});
    shard.full_tensor().zero_();
    shard.redistribute({Replicate()}).zero_();
    EXPECT_TRUE(torch::equal(shard.to_local(), torch::ones({3})));
  });
}

TEST(Distribute, TheFirstRanksDataCounts) {
  for (int world : {1, 2, 3, 4}) {
    testing::on_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Tensor mine = torch::arange(14).view({7, 2}).to(torch::kFloat) + 100 * rank;
      const Tensor first = torch::arange(14).view({7, 2}).to(torch::kFloat);
      for (const Placements& to : layouts(1, {Replicate(), Shard(0), Shard(1)})) {
        const DTensor made = distribute_tensor(mine.clone().requires_grad_(), mesh, to);
        EXPECT_TRUE(torch::equal(made.full_tensor(), first));
        EXPECT_TRUE(made.requires_grad() && made.is_leaf());
      }
      EXPECT_FALSE(distribute_tensor(mine, mesh, {Shard(0)}).requires_grad());
      EXPECT_TRUE(torch::equal(mine, first + 100 * rank)) << "the argument was written";
    });
  }
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    const Tensor first = torch::arange(10).view({5, 2});
    for (const Placements& to : layouts(2, {Replicate(), Shard(0), Shard(1)})) {
      EXPECT_TRUE(
          torch::equal(distribute_tensor(first + 100 * rank, mesh, to).full_tensor(), first));
    }
    EXPECT_THROW(distribute_tensor(first, mesh, {Shard(0), Partial()}), c10::ValueError);
    EXPECT_THROW(distribute_tensor(distribute_tensor(first, mesh, {Shard(0), Shard(0)}), mesh,
                                   {Shard(0), Shard(0)}),
                 c10::TypeError);
  });
}

TEST(Redistribute, BetweenShardsMovesPartsOnly) {
  for (int world : {2, 3, 4}) {
    testing::on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Tensor whole = torch::arange(35).view({7, 5}).to(torch::kFloat);
      const DTensor start = chunk_tensor(whole, mesh, {Shard(0)});
      reset_collective_counts();
      const DTensor moved = start.redistribute({Shard(1)});
      const CollectiveCounts counts = collective_counts();
      EXPECT_EQ(counts.all_to_alls, 1);
      EXPECT_EQ(counts.all_gathers + counts.all_reduces + counts.broadcasts + counts.others, 0);
      const int64_t larger = std::max(start.to_local().nbytes(), moved.to_local().nbytes());
      EXPECT_EQ(counts.bytes, larger) << "more than the larger part";
      EXPECT_TRUE(torch::equal(moved.full_tensor(), whole));
    });
  }
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    const Tensor whole = torch::arange(105).view({7, 5, 3});
    const DTensor start = chunk_tensor(whole, mesh, {Shard(0), Shard(1)});
    for (const Placements& to :
         {Placements{Shard(0), Shard(2)}, {Shard(2), Shard(1)}, {Replicate(), Shard(2)}}) {
      reset_collective_counts();
      const DTensor moved = start.redistribute(to);
      EXPECT_EQ(collective_counts().all_to_alls, 1) << to_string(to);
      EXPECT_TRUE(torch::equal(moved.to_local(), own_part(whole, mesh, to)));
    }
  });
}

TEST(Redistribute, BetweenShardsIsDifferentiable) {
  testing::on_ranks(3, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor whole = torch::randn({7, 5});
    Tensor leaf = chunk_tensor(whole, mesh, {Shard(0)}).requires_grad_();
    const DTensor moved = DTensor(leaf).redistribute({Shard(1)});
    (moved * moved).sum().backward();
    EXPECT_EQ(DTensor(leaf.grad()).placements(), Placements{Shard(0)});
    EXPECT_TRUE(
        torch::equal(DTensor(leaf.grad()).full_tensor(), DTensor(leaf.detach() * 2).full_tensor()));
  });
}

TEST(Distribute, SendsPartsOnly) {
  for (int world : {2, 3, 4}) {
    testing::on_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      const Tensor whole = torch::arange(70).view({7, 10}).to(torch::kFloat);
      reset_collective_counts();
      const DTensor made = distribute_tensor(whole, mesh, {Shard(0)});
      const CollectiveCounts counts = collective_counts();
      EXPECT_EQ(counts.scatters, 1);
      EXPECT_EQ(counts.broadcasts + counts.all_gathers, 0);
      const int64_t chunk = (7 + world - 1) / world * 10 * 4;
      EXPECT_EQ(counts.bytes, rank == 0 ? chunk * world : chunk);
      EXPECT_EQ(made.to_local().storage().nbytes(), static_cast<size_t>(chunk))
          << "a part keeps more than itself alive";
    });
  }
}

}  // namespace
}  // namespace fsdp2
