// Values that steer a program: the same on every rank, wherever the element that decides lies.
#include "support/ranks.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <limits>
#include <vector>

namespace fsdp2::testing::dtensor_agreement {
namespace {

using torch::Tensor;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// `body` with every layout of a tensor of 7 on 1 to 4 ranks, and the place of one element.
template <class Body>
void everywhere(Body body) {
  const auto run = [&](const DeviceMesh& mesh, const Placements& placements) {
    for (const int64_t place : {0, 3, 6}) {
      body([&](const Tensor& whole) -> Tensor { return chunk_tensor(whole, mesh, placements); },
           place);
    }
  };
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [&](int) { run(init_device_mesh("cpu", {world}), {Shard(0)}); });
  }
  on_ranks(4, [&](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    run(mesh, {Replicate(), Shard(0)});
    run(mesh, {Shard(0), Shard(0)});
  });
}

TEST(Agreement, OfComparisons) {
  everywhere([](const auto& lay, int64_t place) {
    const Tensor whole = torch::ones({7}), changed = torch::ones({7});
    changed[place] = 2;
    const Tensor a = lay(whole), b = lay(changed);
    EXPECT_TRUE(torch::equal(a, lay(whole)));
    EXPECT_FALSE(torch::equal(a, b));
    EXPECT_FALSE(torch::equal(whole, b));
    EXPECT_FALSE(torch::equal(a, lay(torch::ones({7, 1}))));
    EXPECT_TRUE(torch::allclose(a, a + 1e-9));
    EXPECT_FALSE(torch::allclose(a, b));
    EXPECT_TRUE((a == b).any().item<bool>());
    EXPECT_FALSE((a == b).all().item<bool>());
    EXPECT_TRUE((b > 1).any().is_nonzero());
    EXPECT_FALSE((a > 1).any().is_nonzero());
    EXPECT_EQ(b.max().item<float>(), 2);
    EXPECT_EQ((b - 1).count_nonzero().item<int64_t>(), 1);
    EXPECT_EQ(b[place].item<float>(), 2);
    EXPECT_EQ(b.argmax().item<int64_t>(), place);
    EXPECT_TRUE((b.sum() > 7.5).is_nonzero());
    EXPECT_FALSE(lay(torch::zeros({1})).is_nonzero());
  });
}

TEST(Agreement, OnFiniteValues) {
  everywhere([](const auto& lay, int64_t place) {
    for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      const Tensor whole = torch::ones({7});
      EXPECT_TRUE(torch::isfinite(lay(whole)).all().template item<bool>());
      whole[place] = bad;
      EXPECT_FALSE(torch::isfinite(lay(whole)).all().template item<bool>());
      EXPECT_FALSE(std::isfinite(lay(whole).sum().template item<float>()));
      EXPECT_FALSE(std::isfinite(lay(whole).abs().max().template item<float>()));

      std::vector<Tensor> grads = {lay(torch::full({7}, 4.0f)), lay(whole)};
      Tensor found = torch::zeros({1});
      at::_amp_foreach_non_finite_check_and_unscale_(grads, found, torch::full({1}, 0.5f));
      EXPECT_EQ(found.item<float>(), 1) << "a rank missed it";
      EXPECT_EQ(grads[0].sum().item<float>(), 14) << "not unscaled";
      grads.pop_back();
      found.zero_();
      at::_amp_foreach_non_finite_check_and_unscale_(grads, found, torch::full({1}, 0.5f));
      EXPECT_EQ(found.item<float>(), 0);
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::dtensor_agreement
