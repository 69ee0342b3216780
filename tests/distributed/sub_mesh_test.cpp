// Modules on parts of the world: some ranks wrap more modules than others, and that disturbs
// nobody.

#include "support/ranks.h"
#include "support/twins.h"

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

}  // namespace
}  // namespace fsdp2::testing::sub_mesh
