// Training over backend "hosts": as the plain module.

#include "support/host_groups.h"
#include "support/twins.h"

#include <gtest/gtest.h>

namespace fsdp2::testing::hosts_training {
namespace {

using torch::Tensor;

/// Weights on both sides of what an all-reduce sends whole.
struct WideImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  WideImpl() {
    a = register_module("a", torch::nn::Linear(37, 301));
    b = register_module("b", torch::nn::Linear(301, 7));
  }
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(x))); }
};
TORCH_MODULE(Wide);

Tensor loss(Wide& module, int rank, int step) {
  torch::manual_seed(100 + rank + 10 * step);
  return module->forward(torch::randn({3, 37})).pow(2).mean();
}

/// Steps both, and compares losses, gradients, norms and parameters.
void train(Twins<Wide>& twins, bool clips = true) {
  torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
      ours(twins.sharded->parameters(), 0.01);
  for (int step = 0; step < 4; ++step) {
    twins.zero_grad();
    twins.backward([&](Wide& module, int rank) {
      const Tensor of_rank = loss(module, rank, step);
      if (&module == &twins.sharded) {
        const torch::NoGradGuard no_grad;
        EXPECT_NEAR(of_rank.item<double>(), loss(twins.plain, rank, step).item<double>(), 1e-5);
      }
      return of_rank;
    });
    if (clips) {
      const double expected = torch::nn::utils::clip_grad_norm_(twins.plain->parameters(), 0.1);
      const double norm = torch::nn::utils::clip_grad_norm_(twins.sharded->parameters(), 0.1);
      EXPECT_NEAR(norm, expected, 1e-5 * expected);
    }
    twins.expect_same(rounding_bound());
    plain.step();
    ours.step();
  }
  twins.expect_same(1e-4, /*gradients=*/false);
}

void wrap(Wide& module, const FullyShardOptions& options) {
  fully_shard(module->a, options);
  fully_shard(module->b, options);
  fully_shard(module, options);
}

class HostsTraining : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Shapes, HostsTraining, ::testing::ValuesIn(host_shapes()));

TEST_P(HostsTraining, FullyShard) {
  on_hosts(GetParam(), [](int) {
    ASSERT_EQ(backend_name(world_group()), "hosts");
    for (const bool reshard : {true, false}) {
      Twins<Wide> twins;
      FullyShardOptions options;
      options.reshard_after_forward = reshard;
      wrap(twins.sharded, options);
      train(twins);
    }
  });
}

TEST_P(HostsTraining, Replicate) {
  on_hosts(GetParam(), [](int) {
    for (const double cap : {25.0, 1e-4}) {  // one bucket, and many
      Twins<Wide> twins;
      ReplicateOptions options;
      options.bucket_cap_mb = cap;
      replicate(twins.sharded, options);
      train(twins, /*clips=*/false);
    }
  });
}

TEST_P(HostsTraining, ReduceInBFloat16) {
  on_hosts(GetParam(), [](int) {
    Twins<Wide> twins;
    FullyShardOptions options;
    options.mp_policy.param_dtype = torch::kBFloat16;
    wrap(twins.sharded, options);
    twins.backward([](Wide& module, int rank) { return loss(module, rank, 0); });
    twins.expect_same(2e-2);
  });
}

struct Case {
  Hosts hosts;
  int64_t shards;                           // ranks
  const char *over_replicas, *over_shards;  // backends
};

TEST(HostsHsdp, MeshesInsideOfHostsAndAcrossThem) {
  const std::vector<Case> cases = {{{"a", "a", "b", "b"}, 2, "gloo", "shm"},
                                   {{"a", "b", "a", "b"}, 2, "shm", "gloo"},
                                   {{"a", "a", "a", "a", "b", "b"}, 2, "hosts", "shm"},
                                   {{"a", "a", "b", "a", "a", "b"}, 3, "shm", "hosts"}};
  for (const Case& tried : cases) {
    on_hosts(tried.hosts, [&](int) {
      Twins<Wide> twins;
      FullyShardOptions options;
      options.mesh =
          init_device_mesh("cpu", {get_world_size() / tried.shards, tried.shards}, {"r", "s"});
      EXPECT_EQ(backend_name(options.mesh.get_group("r")), tried.over_replicas);
      EXPECT_EQ(backend_name(options.mesh.get_group("s")), tried.over_shards);
      wrap(twins.sharded, options);
      train(twins);
    });
  }
}

}  // namespace
}  // namespace fsdp2::testing::hosts_training
