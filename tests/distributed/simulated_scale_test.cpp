// One rank of a world of 1,024 that is not there (backend "fake"): modules are wrapped and stepped
// as there, with real tensors or by sizes alone (device "meta").

#include "support/fake_world.h"
#include "support/models.h"
#include "support/training.h"

#include <tuple>

namespace fsdp2::testing::simulated_scale {
namespace {

using torch::Tensor;

constexpr int kWorld = 1024;

Net wrapped(const DeviceMesh& mesh, const MixedPrecisionPolicy& policy = {}) {
  torch::manual_seed(1);
  Net net(3, 6, 5000);
  FullyShardOptions options;
  options.mesh = mesh;
  options.mp_policy = policy;
  for (auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
  return net;
}

/// What one step sends, the second one, so that it has prefetches.
auto step(Net& net, c10::Device device) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const Tensor ids = torch::zeros({2, 3}, at::device(device).dtype(torch::kLong));
  for (int i = 0; i < 2; ++i) {
    reset_collective_counts();
    net->loss(ids, ids).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const CollectiveCounts counts = collective_counts();
  return std::tuple(counts.all_gathers, counts.reduce_scatters, counts.all_reduces, counts.bytes);
}

class SimulatedScale : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SimulatedScale, ::testing::Values(0, 5, 511, 1023));

TEST_P(SimulatedScale, ShardsFollowTheChunkRule) {
  const FakeWorld world(GetParam(), kWorld);
  Net net = wrapped(init_device_mesh("cpu", {kWorld}));
  for (const auto& item : net->named_parameters()) {
    std::vector<int64_t> sizes = item.value().sizes().vec();
    sizes[0] = chunk_of(sizes[0], kWorld, GetParam()).length;
    EXPECT_EQ(DTensor(item.value()).to_local().sizes(), sizes) << item.key();
  }
}

TEST_P(SimulatedScale, MetaTensorsSendWhatRealOnesSend) {
  const FakeWorld world(GetParam(), kWorld);
  Net real = wrapped(init_device_mesh("cpu", {kWorld}));
  Net sizes_only = wrapped(init_device_mesh("meta", {kWorld}));
  for (const auto& item : sizes_only->named_parameters()) EXPECT_TRUE(item.value().is_meta());
  const auto sent = step(real, torch::kCPU);
  EXPECT_EQ(std::get<0>(sent), 3 + 1 + 2);  // forward; backward, but for the last block
  EXPECT_EQ(std::get<1>(sent), 3 + 1);
  EXPECT_EQ(step(sizes_only, torch::kMeta), sent);
}

TEST_P(SimulatedScale, MetaTensorsOnAMeshOfReplicas) {
  const FakeWorld world(GetParam(), kWorld);
  const std::vector<std::string> names = {"replicate", "shard"};
  Net real = wrapped(init_device_mesh("cpu", {8, 128}, names));
  Net sizes_only = wrapped(init_device_mesh("meta", {8, 128}, names));
  const auto sent = step(real, torch::kCPU);
  EXPECT_EQ(std::get<2>(sent), 3 + 1);
  EXPECT_EQ(step(sizes_only, torch::kMeta), sent);
}

TEST_P(SimulatedScale, MetaTensorsInMixedPrecision) {
  const FakeWorld world(GetParam(), kWorld);
  const MixedPrecisionPolicy policy{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  Net real = wrapped(init_device_mesh("cpu", {kWorld}), policy);
  Net sizes_only = wrapped(init_device_mesh("meta", {kWorld}), policy);
  EXPECT_EQ(step(sizes_only, torch::kMeta), step(real, torch::kCPU));
  // Inputs in another dtype are cast where they meet a parameter.
  const Tensor h = torch::zeros({2, 6}, torch::kMeta);
  EXPECT_EQ(sizes_only->head(h).scalar_type(), torch::kBFloat16);
}

TEST(SimulatedGradients, AreThoseOfThisRankAlone) {
  // Every rank has what this one has, so one row a rank makes each gathered weight rank 0's row,
  // repeated; the mean of the gradients is the own gradient.
  const FakeWorld world(0, 4);
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 4).bias(false));
  const Tensor row = linear->weight.detach()[0].clone();
  fully_shard(linear);
  const Tensor x = torch::tensor({{1.0F, 2.0F, -1.0F}});
  const Tensor y = linear(x);
  EXPECT_LE(difference(y, torch::matmul(x, row).expand({1, 4})), 1e-6);
  y.pow(2).sum().backward();
  const Tensor expected = 2 * y.detach()[0][0] * x;
  EXPECT_LE(difference(DTensor(linear->parameters()[0].grad()).to_local(), expected), 1e-6);
}

}  // namespace
}  // namespace fsdp2::testing::simulated_scale
