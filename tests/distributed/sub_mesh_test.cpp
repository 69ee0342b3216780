// Modules on parts of the world: some ranks wrap more modules than others, and that disturbs
// nobody.

#include "support/ranks.h"
#include "support/twins.h"

#include <algorithm>

namespace fsdp2::testing::sub_mesh {
namespace {

using torch::Tensor;

TEST(SubMesh, RanksMayWrapDifferentNumbersOfModules) {
  on_ranks(3, [](int rank) {
    const ProcessGroup pair = new_group({0, 1});
    const DeviceMesh world = init_device_mesh("cpu", {3});
    Twins<TwoLinear> own, common;
    FullyShardOptions on_pair, on_world;
    on_world.mesh = world;
    if (rank < 2) {
      on_pair.mesh = DeviceMesh::from_group(pair, c10::kCPU);
      fully_shard(own.sharded->a, on_pair);
      fully_shard(own.sharded, on_pair);
    }
    fully_shard(common.sharded->a, on_world);
    fully_shard(common.sharded, on_world);
    auto loss = [](TwoLinear& m, int r) { return m->forward(torch::full({2, 5}, r + 1.0)).sum(); };
    for (int step = 0; step < 2; ++step) {
      if (rank < 2) {
        ((loss(own.plain, 0) + loss(own.plain, 1)) / 2).backward();
        loss(own.sharded, rank).backward();
        own.expect_same(1e-5);
      }
      common.backward(loss);
      common.expect_same(1e-5);
    }
  });
}

/// The mean of a module's loss over some ranks, for its plain twin.
template <class Loss>
void backward_of_mean(TwoLinear& module, const std::vector<int>& ranks, const Loss& loss) {
  Tensor sum = torch::zeros({});
  for (const int rank : ranks) sum = sum + loss(module, rank);
  (sum / static_cast<double>(ranks.size())).backward();
}

TEST(SubMesh, ModulesOfOneProcessOnGroupsThatOverlap) {
  on_ranks(4, [](int rank) {
    // Rank 1 is in two of the groups, rank 2 in all; rank 0 has no third module, rank 3 no first.
    const std::vector<std::vector<int>> members = {{0, 1, 2}, {1, 2, 3}, {2, 3}};
    std::vector<ProcessGroup> groups;
    groups.reserve(members.size());
    for (const auto& ranks : members) groups.push_back(new_group(ranks));
    std::vector<Twins<TwoLinear>> twins(members.size());
    const auto mine = [&](size_t i) {
      return std::count(members[i].begin(), members[i].end(), rank);
    };
    for (size_t i = 0; i < members.size(); ++i) {
      if (!mine(i)) continue;
      FullyShardOptions options;
      options.mesh = DeviceMesh::from_group(groups[i], c10::kCPU);
      options.reshard_after_forward = true;
      wrap_layers(twins[i].sharded, options);
    }
    std::vector<torch::optim::AdamW> plain, ours;
    for (auto& pair : twins) {
      plain.emplace_back(pair.plain->parameters(), torch::optim::AdamWOptions(0.01));
      ours.emplace_back(pair.sharded->parameters(), torch::optim::AdamWOptions(0.01));
    }
    const auto loss = [](TwoLinear& module, int r) {
      return module->forward(torch::full({2, 5}, r + 1.0)).pow(2).sum();
    };
    for (int step = 0; step < 3; ++step) {
      // Each on its own, then all that a rank has in one backward.
      for (const bool together : {false, true}) {
        Tensor sum = torch::zeros({});
        for (size_t i = 0; i < members.size(); ++i) {
          if (!mine(i)) continue;
          twins[i].zero_grad();
          backward_of_mean(twins[i].plain, members[i], loss);
          const Tensor own = loss(twins[i].sharded, rank);
          if (together) {
            sum = sum + own;
          } else {
            own.backward();
          }
        }
        if (together) sum.backward();
        for (size_t i = 0; i < members.size(); ++i) {
          if (!mine(i)) continue;
          for (const auto& item : twins[i].plain->named_parameters()) {
            const Tensor whole = full(twins[i].sharded->named_parameters()[item.key()].grad());
            EXPECT_LE(difference(whole, item.value().grad()), 1e-4) << i << " " << item.key();
          }
          plain[i].step();
          ours[i].step();
          twins[i].expect_same(1e-4, /*gradients=*/false);
        }
      }
    }
  });
}

TEST(SubMesh, OneModuleWhoseChildrenAreOnGroupsThatOverlap) {
  on_ranks(3, [](int rank) {
    const DeviceMesh world = init_device_mesh("cpu", {3});
    const ProcessGroup pair = new_group({1, 2});
    Twins<TwoLinear> twins;
    FullyShardOptions options;
    options.mesh = world;
    if (rank > 0) {
      FullyShardOptions on_pair;
      on_pair.mesh = DeviceMesh::from_group(pair, c10::kCPU);
      fully_shard(twins.sharded->b, on_pair);
    }
    fully_shard(twins.sharded->a, options);
    const auto loss = [](TwoLinear& module, int r) {
      return module->forward(torch::full({2, 5}, r + 1.0)).pow(2).sum();
    };
    for (int step = 0; step < 2; ++step) {
      // a: the mean over all; b: over the ranks that hold it together, else each rank's own.
      std::vector<Tensor> of_a, of_b;
      for (int r = 0; r < 3; ++r) {
        twins.plain->zero_grad();
        loss(twins.plain, r).backward();
        of_a.push_back(twins.plain->a->weight.grad().clone());
        of_b.push_back(twins.plain->b->weight.grad().clone());
      }
      twins.sharded->zero_grad();
      loss(twins.sharded, rank).backward();
      const auto ours = twins.sharded->named_parameters();
      EXPECT_LE(difference(full(ours["a.weight"].grad()), (of_a[0] + of_a[1] + of_a[2]) / 3), 1e-4);
      EXPECT_LE(
          difference(full(ours["b.weight"].grad()), rank == 0 ? of_b[0] : (of_b[1] + of_b[2]) / 2),
          1e-4);
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::sub_mesh
