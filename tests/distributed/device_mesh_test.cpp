#include "mesh/mesh_impl.h"
#include "support/errors.h"
#include "support/ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/device_mesh.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>

namespace fsdp2 {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

/// The ranks of a group, by asking them.
std::vector<int> members(const ProcessGroup& group) {
  std::vector<int> ranks;
  for (const auto& rank : all_gather_bytes(std::to_string(get_rank()), group))
    ranks.push_back(std::stoi(rank));
  return ranks;
}

class Mesh1D : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Mesh1D, ::testing::Values(1, 2, 3, 4));

TEST_P(Mesh1D, IsTheWorld) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {world}, {"dp"});
    EXPECT_TRUE(mesh.defined());
    EXPECT_EQ(mesh.ndim(), 1);
    EXPECT_EQ(mesh.size(), world);
    EXPECT_EQ(mesh.size("dp"), world);
    EXPECT_EQ(mesh.size(-1), world);
    EXPECT_EQ(mesh.get_local_rank(), rank);
    EXPECT_EQ(mesh.get_local_rank("dp"), rank);
    EXPECT_EQ(mesh.get_coordinate(), std::vector<int64_t>{rank});
    EXPECT_EQ(mesh.device(), c10::Device(c10::kCPU));
    EXPECT_EQ(mesh.get_group(), world_group())
        << "a dimension over the whole world reuses its group";
    EXPECT_EQ(mesh["dp"], mesh);
  });
}

TEST_P(Mesh1D, TheDefaultMeshIsMadeOnceAWorld) {
  const int world = GetParam();
  on_ranks(world, [world](int) {
    const DeviceMesh mesh = default_mesh();
    EXPECT_EQ(mesh.shape(), std::vector<int64_t>{world});
    EXPECT_TRUE(mesh.mesh_dim_names().empty());
    EXPECT_EQ(&mesh.ranks(), &default_mesh().ranks());
  });
}

TEST_P(Mesh1D, ReductionsHaveAGroupOfTheirOwn) {
  const int world = GetParam();
  on_ranks(world, [world](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {world});
    const ProcessGroup reductions = reduce_group_of(mesh, 0);
    EXPECT_EQ(reduce_group_of(init_device_mesh("cpu", {world}), 0), reductions)
        << "made once a group";
    EXPECT_EQ(reductions != mesh.get_group(), world > 1);
    EXPECT_EQ(reductions->getRank(), rank);
    // One rank starts the two in another order than the rest.
    const auto ones = torch::ones({2}), all = torch::zeros({2 * world}), sum = torch::ones({2});
    Work gather, reduce;
    if (rank == 0) reduce = all_reduce(sum, ReduceOp::kSum, reductions);
    gather = all_gather_single(all, ones, mesh.get_group());
    if (rank != 0) reduce = all_reduce(sum, ReduceOp::kSum, reductions);
    wait(gather);
    wait(reduce);
    EXPECT_EQ(all.sum().item<float>(), 2 * world);
    EXPECT_EQ(sum.sum().item<float>(), 2 * world);
  });
}

TEST(MeshND, TwoByTwo) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    EXPECT_THAT(mesh.ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(mesh.get_coordinate(), (std::vector<int64_t>{rank / 2, rank % 2}));
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 2);
    EXPECT_EQ(mesh.get_local_rank(1), rank % 2);
    EXPECT_EQ(members(mesh.get_group("dp")), (std::vector<int>{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(members(mesh.get_group("tp")), (std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1}));
    EXPECT_THAT(error_of([&] { mesh.get_group(); }),
                HasSubstr("needs a 1-D mesh; this one is (dp=2, tp=2)"));
    EXPECT_THAT(error_of([&] { mesh.get_local_rank(); }), HasSubstr("give a dimension"));
    EXPECT_THAT(error_of([&] { mesh.get_group("pp"); }),
                HasSubstr("no dimension 'pp'; there are: dp, tp"));
    EXPECT_THAT(error_of([&] { mesh.size(2); }), HasSubstr("dimension 2 is outside -2 to 1"));
  });
}

TEST(MeshND, SlicesShareGroups) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const DeviceMesh dp = mesh["dp"];
    EXPECT_EQ(dp.get_group(), mesh.get_group("dp"));
    EXPECT_THAT(dp.ranks(), ElementsAre(rank % 2, rank % 2 + 2));
    EXPECT_EQ(dp.get_local_rank(), rank / 2);
    EXPECT_EQ((mesh[std::vector<std::string>{"dp", "tp"}]), mesh);
    EXPECT_THAT(error_of([&] { mesh[std::vector<std::string>{"tp", "dp"}]; }),
                HasSubstr("not in the mesh's order"));
    EXPECT_THAT(error_of([&] { mesh[std::vector<std::string>{"dp", "dp"}]; }),
                HasSubstr("overlaps"));
    EXPECT_THAT(error_of([&] { mesh["pp"]; }), HasSubstr("there are: dp, tp"));
    EXPECT_THAT(error_of([&] { dp["tp"]; }), HasSubstr("there are: dp"));
    // Reductions of the two halves do not meet.
    const auto sum = torch::full({1}, rank + 1.0);
    wait(all_reduce(sum, ReduceOp::kSum, reduce_group_of(dp, "dp")));
    EXPECT_EQ(sum.item<float>(), 2 * (rank % 2) + 4);
  });
}

TEST(MeshND, FlattenedDimensionsAreSlicedFromTheRoot) {
  on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 1, 2}, {"replicate", "shard", "tp"});
    const DeviceMesh data = mesh[std::vector<std::string>{"replicate", "shard"}].flatten("data");
    EXPECT_EQ(data.shape(), std::vector<int64_t>{2});
    EXPECT_THAT(data.ranks(), ElementsAre(rank % 2, rank % 2 + 2));
    EXPECT_EQ(members(data.get_group()), data.ranks());
    EXPECT_EQ(mesh["data"], data);
    EXPECT_EQ(mesh["data"].get_group(), data.get_group());
    const DeviceMesh both = mesh[std::vector<std::string>{"data", "tp"}];
    EXPECT_EQ(both.shape(), (std::vector<int64_t>{2, 2}));
    EXPECT_THAT(both.ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(error_of([&] { mesh[std::vector<std::string>{"data", "shard"}]; }),
                HasSubstr("overlaps"));

    const DeviceMesh all = mesh.flatten();
    EXPECT_THAT(all.mesh_dim_names(), ElementsAre("replicate_shard_tp"));
    EXPECT_EQ(all.get_group(), world_group());
    EXPECT_EQ(mesh.flatten().get_group(), all.get_group()) << "made once";
    EXPECT_THAT(error_of([&] { mesh.flatten("data"); }),
                HasSubstr("'data' names other flattened dimensions"));
    EXPECT_THAT(error_of([&] { mesh.flatten("tp"); }), HasSubstr("is a dimension of the mesh"));
  });
}

TEST(MeshND, FromGroups) {
  on_ranks(4, [](int rank) {
    std::vector<ProcessGroup> groups(2);
    for (int row = 0; row < 2; ++row) {
      if (auto made = new_group({row, row + 2})) groups[0] = made;
    }
    for (int row = 0; row < 2; ++row) {
      if (auto made = new_group({2 * row, 2 * row + 1})) groups[1] = made;
    }
    const auto mesh = DeviceMesh::from_group(groups, c10::kCPU, {0, 1, 2, 3}, {2, 2}, {"a", "b"});
    EXPECT_EQ(mesh, init_device_mesh("cpu", {2, 2}, {"a", "b"}));
    EXPECT_EQ(mesh["b"].get_group(), groups[1]);
    EXPECT_EQ(members(reduce_group_of(mesh, "a")), (std::vector<int>{rank % 2, rank % 2 + 2}));
    EXPECT_THAT(error_of([&] {
                  DeviceMesh::from_group({groups[1], groups[0]}, c10::kCPU, {0, 1, 2, 3}, {2, 2});
                }),
                HasSubstr("the group of dim0 has ranks {"));
    EXPECT_THAT(
        error_of([&] { DeviceMesh::from_group({groups[0]}, c10::kCPU, {0, 1, 2, 3}, {2, 2}); }),
        HasSubstr("has 1 groups for 2 dimensions"));

    const auto line = DeviceMesh::from_group(groups[0], c10::kCPU, "a");
    EXPECT_EQ(line, mesh["a"]);
    EXPECT_EQ(line.get_group(), groups[0]);
  });
}

TEST(MeshND, AMeshOfSomeRanks) {
  on_ranks(3, [](int rank) {
    const ProcessGroup group = new_group({2, 0});
    const auto mesh = DeviceMesh::from_group({group}, c10::kCPU, {2, 0}, {2});
    EXPECT_EQ(mesh.size(), 2);
    if (rank == 1) {
      EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
      EXPECT_THAT(error_of([&] { mesh.get_group(); }),
                  HasSubstr("rank 1 is not in the mesh of ranks {2, 0}"));
    } else {
      EXPECT_EQ(mesh.get_local_rank(), rank == 2 ? 0 : 1);
      EXPECT_EQ(members(mesh.get_group()), (std::vector<int>{2, 0}));
    }
  });
}

TEST(MeshErrors, BadArgumentsAndDisagreement) {
  on_ranks(2, [](int rank) {
    EXPECT_THAT(error_of([] { init_device_mesh("cpu", {3}); }),
                HasSubstr("`shape` (3) has room for 3 ranks but there are 2"));
    EXPECT_THAT(error_of([] { init_device_mesh("cpu", {}); }), HasSubstr("`shape` is empty"));
    EXPECT_THAT(error_of([] { init_device_mesh("cpu", {-1, -2}); }), HasSubstr("must be positive"));
    EXPECT_THAT(error_of([] { init_device_mesh("cpu", {2, 1}, {"a", "a"}); }),
                HasSubstr("'a' twice"));
    EXPECT_THAT(error_of([] { init_device_mesh("cpu", {2, 1}, {"a"}); }),
                HasSubstr("for 2 dimensions"));
    EXPECT_THAT(error_of([] { init_device_mesh("cpu:0", {2}); }), HasSubstr("`device` is 'cpu:0'"));
    EXPECT_THAT(error_of([] { init_device_mesh("cuda", {2}); }), HasSubstr("no backend for it"));
    EXPECT_THAT(error_of([&] { init_device_mesh("cpu", {1, 2}, {rank == 0 ? "a" : "b", "c"}); }),
                HasSubstr("rank 1 asks for (b=1, c=2) on cpu but rank 0 for (a=1, c=2) on cpu"));
    EXPECT_THAT(error_of([] { DeviceMesh().size(); }), HasSubstr("default-constructed"));
  });
}

TEST(MeshText, SaysShapeDeviceAndRanks) {
  on_ranks(2, [](int) {
    std::ostringstream out;
    out << init_device_mesh("cpu", {1, 2}, {"dp", "tp"}) << " " << DeviceMesh();
    EXPECT_EQ(out.str(), "DeviceMesh((dp=1, tp=2), 'cpu', ranks={0, 1}) DeviceMesh()");
    EXPECT_NE(init_device_mesh("cpu", {1, 2}), init_device_mesh("cpu", {2, 1}));
    EXPECT_NE(init_device_mesh("cpu", {2}), DeviceMesh());
  });
}

}  // namespace
}  // namespace fsdp2
