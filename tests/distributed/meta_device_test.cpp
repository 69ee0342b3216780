// Models that are built without memory, sharded, and only then given memory and values.

#include "support/counting_allocator.h"
#include "support/errors.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::meta_device {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

class MetaDevice : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, MetaDevice, ::testing::Values(1, 2, 3, 4));

/// Every kind of module with parameters or buffers, and of initialisation in torch.
struct ZooImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  ZooImpl() {
    linear = register_module("linear", torch::nn::Linear(5, 7));
    embedding = register_module(
        "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 5).padding_idx(2)));
    conv = register_module("conv", torch::nn::Conv2d(3, 5, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    lstm = register_module("lstm", torch::nn::LSTM(5, 7));
    attention = register_module("attention", torch::nn::MultiheadAttention(6, 2));
  }
  Tensor forward(const Tensor& ids) {
    const Tensor h = linear(embedding(ids)).sum();
    const Tensor image = norm(conv(torch::ones({2, 3, 5, 5}))).sum();
    const Tensor sequence = std::get<0>(lstm(torch::ones({2, 3, 5}))).sum();
    const Tensor x = torch::ones({2, 1, 6});
    return h + image + sequence + std::get<0>(attention(x, x, x)).sum();
  }
};
TORCH_MODULE(Zoo);

void reset(torch::nn::Module& module) {
  if (auto* m = module.as<torch::nn::Linear>()) m->reset_parameters();
  if (auto* m = module.as<torch::nn::Embedding>()) m->reset_parameters();
  if (auto* m = module.as<torch::nn::Conv2d>()) m->reset_parameters();
  if (auto* m = module.as<torch::nn::BatchNorm2d>()) m->reset_parameters();
  if (auto* m = module.as<torch::nn::LSTM>()) m->reset_parameters();
  if (auto* m = module.as<torch::nn::MultiheadAttention>()) m->_reset_parameters();
}

template <class M>
M on_meta() {
  MetaDeviceGuard guard;
  return M();
}

void wrap_children(torch::nn::Module& module, const FullyShardOptions& options = {}) {
  for (const auto& child : module.children()) fully_shard(child, options);
  fully_shard(module.shared_from_this(), options);
}

TEST_P(MetaDevice, OneSeedGivesTheWeightsOfThePlainModuleAtEveryWorldSize) {
  for (bool low_precision : {false, true}) {
    on_ranks(GetParam(), [&](int rank) {
      Zoo plain;
      torch::manual_seed(7);
      for (const auto& module : plain->modules()) reset(*module);

      Zoo zoo = on_meta<Zoo>();
      for (const auto& parameter : zoo->parameters()) EXPECT_TRUE(parameter.is_meta());
      for (const auto& item : zoo->named_buffers())
        EXPECT_TRUE(item.value().is_meta() || item.value().dim() == 0) << item.key();
      FullyShardOptions options;
      if (low_precision) options.mp_policy.param_dtype = torch::kBFloat16;
      wrap_children(*zoo, options);
      to_empty(*zoo, torch::kCPU);
      torch::manual_seed(100 + rank);
      const Tensor expected = torch::rand({3});
      torch::manual_seed(100 + rank);
      init_weights(*zoo, reset, 7);
      EXPECT_TRUE(torch::equal(torch::rand({3}), expected));  // the generator was put back
      expect_same_module(*zoo, *plain, 0, /*gradients=*/false);
      for (const auto& item : plain->named_buffers())
        EXPECT_TRUE(torch::equal(zoo->named_buffers()[item.key()], item.value()));
      if (low_precision) return;
      const Tensor ids = torch::tensor({{1, 2, 10}, {0, 3, 4}});
      EXPECT_LE(difference(zoo->forward(ids), plain->forward(ids)), 1e-4);
    });
  }
}

TEST_P(MetaDevice, InitialisationAsUsersWriteIt) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    TwoLinear& plain = twins.plain;
    TwoLinear meta = on_meta<TwoLinear>();
    wrap_layers(meta, true);
    to_empty(*meta, torch::kCPU);
    for (TwoLinear* module : {&plain, &meta}) {
      torch::manual_seed(3);
      TwoLinearImpl& m = **module;
      m.a->reset_parameters();
      torch::nn::init::orthogonal_(m.b->weight);
      torch::NoGradGuard no_grad;
      m.b->bias.fill_(2).mul_(1.5);
      m.b->bias[3] = -1;
      m.a->bias.slice(0, 1, 3).copy_(torch::tensor({7.F, 8.F}));
      m.a->weight.t().select(0, 2).zero_();
      m.b->weight.data().add_(torch::ones({5, 5}));
    }
    expect_same_module(*meta, *plain, 0, /*gradients=*/false);
    // ... and by way of parameters().
    for (TwoLinear* module : {&plain, &meta}) {
      torch::manual_seed(4);
      for (Tensor& parameter : (*module)->parameters())
        torch::nn::init::normal_(parameter, 0, 0.02);
    }
    expect_same_module(*meta, *plain, 0, /*gradients=*/false);
    const Tensor x = torch::randn({2, 5});
    EXPECT_LE(difference(meta->forward(x), plain->forward(x)), 1e-6);
    torch::NoGradGuard no_grad;
    EXPECT_THAT(error_of([&] { meta->a->weight.fill_(1); }), HasSubstr("a.weight"));
  });
}

TEST_P(MetaDevice, InitialisingAgainGivesNewValuesAndReplicasAgree) {
  on_ranks(GetParam(), [](int rank) {
    TwoLinear module = on_meta<TwoLinear>();
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {get_world_size(), 1}, {"replicate", "shard"});
    fully_shard(module, options);
    to_empty(*module, torch::kCPU);
    torch::manual_seed(50 + rank);  // ranks disagree
    init_weights(*module, reset);
    const Tensor first = full(module->parameters()[0]);
    check_module_states(*module, options.mesh);
    init_weights(*module, reset);
    check_module_states(*module, options.mesh);
    EXPECT_GT(difference(full(module->parameters()[0]), first), 0.01);
    // Also after training has begun.
    module->forward(torch::ones({2, 5})).sum().backward();
    init_weights(*module, reset, 9);
  });
}

TEST_P(MetaDevice, UseBeforeThereAreValuesIsRefusedByName) {
  on_ranks(GetParam(), [](int) {
    Zoo zoo = on_meta<Zoo>();
    wrap_children(*zoo);
    const Tensor x = torch::ones({2, 5});
    EXPECT_THAT(error_of([&] { zoo->linear(x); }),
                AllOf(HasSubstr("'linear.weight', 'linear.bias' are still on the meta device"),
                      HasSubstr("to_empty")));
    EXPECT_THAT(error_of([&] { to_empty(*zoo, torch::kCUDA); }), HasSubstr("was sharded for cpu"));
    to_empty(*zoo, torch::kCPU);
    EXPECT_THAT(error_of([&] { zoo->linear(x); }),
                AllOf(HasSubstr("'linear.weight', 'linear.bias' were given memory"),
                      HasSubstr("no values")));
    torch::NoGradGuard no_grad;
    zoo->linear->weight.fill_(1);
    EXPECT_THAT(error_of([&] { zoo->linear(x); }),
                AllOf(HasSubstr("'linear.bias' were given"), Not(HasSubstr("linear.weight"))));
    DTensor(zoo->named_parameters()["linear.bias"]).to_local().fill_(1);  // around the DTensor
    EXPECT_THAT(error_of([&] { zoo->linear(x); }),
                AllOf(HasSubstr("buffers 'norm.running_mean', 'norm.running_var'")));
    zoo->norm->reset_running_stats();
    EXPECT_EQ(error_of([&] { zoo->linear(x); }), "");
  });
}

TEST_P(MetaDevice, WhatHasMemoryKeepsItsValues) {
  on_ranks(GetParam(), [](int) {
    Twins<TwoLinear> twins;
    fully_shard(twins.sharded);
    to_empty(*twins.sharded, torch::kCPU);
    twins.expect_same(0, /*gradients=*/false);
    const Tensor x = torch::ones({2, 5});
    EXPECT_LE(difference(twins.sharded->forward(x), twins.plain->forward(x)), 1e-6);
  });
}

TEST(MetaDeviceMemory, NoMoreThanOneWholeParameterAboveTheShards) {
  on_ranks(2, [](int) {
    auto& memory = CountingAllocator::install();
    torch::nn::Sequential model = [] {
      MetaDeviceGuard guard;
      torch::nn::Sequential layers;
      for (int i = 0; i < 8; ++i) layers->push_back(torch::nn::Linear(256, 256));
      return layers;
    }();
    const size_t one = (256 * 256 + 256) * sizeof(float);
    EXPECT_LT(memory.live_bytes(), one / 4);
    for (const auto& layer : model->children()) fully_shard(layer);
    fully_shard(model);
    EXPECT_LT(memory.live_bytes(), one / 4);
    size_t peak = 0;
    memory.on_allocate = [&] { peak = std::max(peak, memory.live_bytes()); };
    to_empty(*model, torch::kCPU);
    init_weights(*model, reset, 1);
    EXPECT_LT(peak, 8 * one / 2 + one + one / 2 + one / 4);  // whole, and its part
  });
}

TEST(MetaDeviceMemory, SizesBeyond32Bits) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear linear = [] {
      MetaDeviceGuard guard;
      return torch::nn::Linear(torch::nn::LinearOptions(65536, 65537).bias(false));
    }();
    fully_shard(linear);
    const DTensor weight(linear->parameters()[0]);
    EXPECT_EQ(weight.numel(), int64_t{65536} * 65537);
    EXPECT_EQ(weight.to_local().numel(), int64_t{65536} * (rank == 0 ? 32769 : 32768));
    EXPECT_EQ(linear->weight.numel(), int64_t{65536} * 65537);
  });
}

}  // namespace
}  // namespace fsdp2::testing::meta_device
