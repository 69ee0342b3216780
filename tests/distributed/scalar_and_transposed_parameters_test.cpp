// pytorch#132934: a 0-dim parameter. pytorch#137000: parameters that are transposed views or
// channels-last.

#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::scalar_and_transposed_parameters {
namespace {

using torch::Tensor;

struct BlockWithScaleImpl : torch::nn::Module {
  Tensor scale, one;
  BlockWithScaleImpl() {
    scale = register_parameter("scale", torch::tensor(0.5));
    one = register_parameter("one", torch::full({1}, 0.5));
  }
};

class OddParameters : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OddParameters, ::testing::Values(1, 2, 3, 4));

TEST_P(OddParameters, ScalarsAreSupported) {
  on_ranks(GetParam(), [](int rank) {
    auto root = std::make_shared<torch::nn::Module>();
    auto block = root->register_module("block", std::make_shared<BlockWithScaleImpl>());
    fully_shard(root);
    const Tensor scale = root->named_parameters()["block.scale"];
    EXPECT_EQ(scale.dim(), 0);
    torch::optim::SGD optimizer(root->parameters(), 0.1);
    ((rank + 1) * block->scale + (rank + 1) * block->one.sum()).backward();
    const double mean = (get_world_size() + 1) / 2.0;
    EXPECT_EQ(full(scale.grad()).item<double>(), mean);
    EXPECT_EQ(full(root->named_parameters()["block.one"].grad()).item<double>(), mean);
    optimizer.step();
    EXPECT_NEAR(full(scale).item<double>(), 0.5 - 0.1 * mean, 1e-7);
    EXPECT_NEAR((block->scale * 1).item<double>(), 0.5 - 0.1 * mean, 1e-7);
    EXPECT_NEAR((block->one * 1).item<double>(), 0.5 - 0.1 * mean, 1e-7);
  });
}

struct TransposedImpl : torch::nn::Module {
  Tensor w, conv, slice;
  TransposedImpl() {
    w = register_parameter("w", torch::arange(24, torch::kFloat).view({6, 4}).t() / 24);
    conv = register_parameter("conv", torch::arange(48, torch::kFloat)
                                              .view({4, 3, 2, 2})
                                              .contiguous(at::MemoryFormat::ChannelsLast) /
                                          48);
    slice =
        register_parameter("slice", torch::arange(20, torch::kFloat).view({5, 4}).t().contiguous());
  }
  Tensor forward(const Tensor& x, const Tensor& image) {
    return x.mm(w).pow(2).sum() + torch::conv2d(image, conv).pow(2).sum() + slice.sin().sum();
  }
};
TORCH_MODULE(Transposed);

TEST_P(OddParameters, LogicalOrderIsKept) {
  on_ranks(GetParam(), [](int) {
    Twins<Transposed> twins;
    const Tensor conv = twins.plain->conv;
    ASSERT_TRUE(twins.plain->w.stride(0) == 1 &&
                conv.is_contiguous(at::MemoryFormat::ChannelsLast));
    fully_shard(twins.sharded);
    EXPECT_EQ(twins.sharded->w.strides(), twins.plain->w.strides());
    EXPECT_EQ(twins.sharded->conv.strides(), twins.plain->conv.strides());
    EXPECT_EQ(difference(twins.sharded->w + 0, twins.plain->w), 0);
    EXPECT_EQ(difference(twins.sharded->conv + 0, twins.plain->conv), 0);
    torch::optim::AdamW plain(twins.plain->parameters(), 0.01),
        ours(twins.sharded->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      twins.zero_grad();
      twins.backward([&](Transposed& m, int r) {
        torch::manual_seed(100 * step + r);
        return m->forward(torch::randn({2, 4}), torch::randn({1, 3, 4, 4}));
      });
      twins.expect_same(get_world_size() == 1 ? 0 : 1e-4);
      plain.step();
      ours.step();
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::scalar_and_transposed_parameters
