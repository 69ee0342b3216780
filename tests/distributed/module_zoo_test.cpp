// Unmodified torch::nn modules of many kinds, trained sharded and plain. On one rank every loss,
// gradient and parameter must have the same bits.

#include "support/ranks.h"
#include "support/training.h"

#include <ATen/autocast_mode.h>

namespace fsdp2::testing {
namespace {

using namespace torch::nn;
using torch::Tensor;

constexpr int kSteps = 20;

template <class M, class Loss>
void expect_same_bits(const std::function<M()>& make, Loss loss,
                      torch::ScalarType dtype = torch::kFloat) {
  on_ranks(1, [&](int) {
    torch::manual_seed(7);
    M plain = make();
    M sharded = make();
    plain->to(dtype);
    sharded->to(dtype);
    copy_values(*sharded, *plain);
    for (const auto& child : sharded->children()) {
      if (!child->parameters().empty() && !child->template as<ModuleListImpl>()) fully_shard(child);
    }
    fully_shard(sharded);
    torch::optim::AdamW plain_optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW optimizer(sharded->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < kSteps; ++step) {
      torch::manual_seed(step);
      Tensor expected = loss(plain);
      torch::manual_seed(step);
      Tensor value = loss(sharded);
      ASSERT_EQ(difference(value, expected), 0) << "loss of step " << step;
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      expected.backward();
      value.backward();
      expect_same_module(*sharded, *plain, 0);
      plain_optimizer.step();
      optimizer.step();
      if (::testing::Test::HasFailure()) FAIL() << "first difference in step " << step;
    }
    expect_same_module(*sharded, *plain, 0, /*gradients=*/false);
  });
}

struct MlpImpl : Module {
  Linear a{nullptr}, b{nullptr}, c{nullptr};
  MlpImpl() {
    a = register_module("a", Linear(7, 13));
    b = register_module("b", Linear(13, 13));
    c = register_module("c", Linear(13, 3));
  }
  Tensor forward(Tensor x) { return c(torch::gelu(b(torch::relu(a(x))))); }
};
TORCH_MODULE(Mlp);

Tensor mlp_loss(Mlp& m, torch::ScalarType dtype) {
  return m->forward(torch::randn({5, 7}).to(dtype)).pow(2).mean();
}

TEST(ModuleZoo, Mlp) {
  expect_same_bits<Mlp>([] { return Mlp(); }, [](Mlp& m) { return mlp_loss(m, torch::kFloat); });
}

TEST(ModuleZoo, MlpBfloat16) {
  expect_same_bits<Mlp>([] { return Mlp(); }, [](Mlp& m) { return mlp_loss(m, torch::kBFloat16); },
                        torch::kBFloat16);
}

TEST(ModuleZoo, ConvAndNorms) {
  expect_same_bits<Sequential>(
      [] {
        return Sequential(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(),
                          Conv2d(Conv2dOptions(8, 4, 3).groups(2)), GroupNorm(2, 4), Flatten(),
                          Linear(4 * 6 * 6, 5));
      },
      [](Sequential& m) { return m->forward(torch::randn({2, 3, 8, 8})).pow(2).mean(); });
}

TEST(ModuleZoo, Lstm) {
  expect_same_bits<LSTM>(
      [] { return LSTM(LSTMOptions(5, 7).num_layers(2).bidirectional(true)); },
      [](LSTM& m) { return std::get<0>(m->forward(torch::randn({4, 3, 5}))).pow(2).mean(); });
}

TEST(ModuleZoo, Gru) {
  expect_same_bits<GRU>(
      [] { return GRU(GRUOptions(5, 7)); },
      [](GRU& m) { return std::get<0>(m->forward(torch::randn({4, 3, 5}))).pow(2).mean(); });
}

TEST(ModuleZoo, LstmCell) {
  expect_same_bits<LSTMCell>([] { return LSTMCell(4, 6); },
                             [](LSTMCell& m) {
                               Tensor x = torch::randn({3, 4});
                               auto h = m->forward(x);
                               h = m->forward(x, h);
                               return (std::get<0>(h) * std::get<1>(h)).mean();
                             });
}

TEST(ModuleZoo, MultiheadAttention) {
  expect_same_bits<MultiheadAttention>(
      [] { return MultiheadAttention(MultiheadAttentionOptions(8, 2)); },
      [](MultiheadAttention& m) {
        Tensor x = torch::randn({4, 3, 8});
        return std::get<0>(m->forward(x, x, x)).pow(2).mean();
      });
}

TEST(ModuleZoo, TransformerEncoder) {
  for (auto dtype : {torch::kFloat, torch::kBFloat16}) {
    expect_same_bits<TransformerEncoder>(
        [] {
          return TransformerEncoder(TransformerEncoderOptions(
              TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2).dropout(0.1)), 2));
        },
        [dtype](TransformerEncoder& m) {
          return m->forward(torch::randn({4, 3, 8}).to(dtype)).pow(2).mean();
        },
        dtype);
  }
}

TEST(ModuleZoo, EmbeddingBag) {
  expect_same_bits<EmbeddingBag>(
      [] { return EmbeddingBag(EmbeddingBagOptions(10, 4).mode(torch::kSum)); },
      [](EmbeddingBag& m) {
        return m->forward(torch::tensor({1, 2, 4, 5, 4, 3, 2, 9}), torch::tensor({0, 4}))
            .pow(2)
            .mean();
      });
}

TEST(ModuleZoo, Bilinear) {
  expect_same_bits<Bilinear>(
      [] { return Bilinear(3, 4, 5); },
      [](Bilinear& m) {
        return m->forward(torch::randn({2, 3}), torch::randn({2, 4})).pow(2).mean();
      });
}

TEST(ModuleZoo, TransposedConvolution) {
  expect_same_bits<Sequential>(
      [] {
        return Sequential(ConvTranspose2d(ConvTranspose2dOptions(3, 4, 3)),
                          PReLU(PReLUOptions().num_parameters(4)),
                          InstanceNorm2d(InstanceNorm2dOptions(4).affine(true)),
                          Conv2d(Conv2dOptions(4, 4, 1)));
      },
      [](Sequential& m) { return m->forward(torch::randn({2, 3, 5, 5})).pow(2).mean(); });
}

TEST(ModuleZoo, Convolution1dAnd3d) {
  expect_same_bits<Sequential>(
      [] { return Sequential(Conv1d(Conv1dOptions(3, 4, 3)), Conv1d(Conv1dOptions(4, 4, 1))); },
      [](Sequential& m) { return m->forward(torch::randn({2, 3, 9})).pow(2).mean(); });
  expect_same_bits<Sequential>(
      [] { return Sequential(Conv3d(Conv3dOptions(2, 3, 3))); },
      [](Sequential& m) { return m->forward(torch::randn({1, 2, 5, 5, 5})).pow(2).mean(); });
}

TEST(ModuleZoo, WeightsUsedInManyWays) {
  expect_same_bits<Linear>([] { return Linear(6, 6); },
                           [](Linear& m) {
                             Tensor x = torch::randn({3, 6});
                             Tensor w = m->weight;
                             Tensor u = torch::einsum("ij,kj->ik", {x, w});
                             Tensor n = torch::norm(w) + w.triu().sum();
                             Tensor s = torch::stack({w, w.t()}).mean();
                             Tensor i = w.index({torch::tensor({0, 2})}).sum();
                             Tensor c = torch::cat({w, x}).sum() + w.unfold(0, 2, 2).sum();
                             Tensor v = torch::linalg_inv(w + 10 * torch::eye(6)).sum();
                             return u.pow(2).mean() + n + s + i + c + v + m->bias.sum();
                           });
}

TEST(ModuleZoo, DoubleBackward) {
  expect_same_bits<Linear>([] { return Linear(6, 6); },
                           [](Linear& m) {
                             Tensor x = torch::randn({3, 6}).requires_grad_();
                             Tensor y = torch::tanh(m(x)).sum();
                             Tensor g = torch::autograd::grad({y}, {x}, {}, true, true)[0];
                             return g.pow(2).sum() + y;
                           });
}

TEST(ModuleZoo, ComplexViews) {
  expect_same_bits<Linear>(
      [] { return Linear(6, 6); },
      [](Linear& m) {
        Tensor c = torch::view_as_complex(m->weight.view({6, 3, 2}).contiguous());
        return c.abs().sum() + torch::fft::fft(m->weight).abs().sum() + m->bias.sum();
      });
}

TEST(ModuleZoo, Autocast) {
  expect_same_bits<Linear>([] { return Linear(6, 6); },
                           [](Linear& m) {
                             at::autocast::set_autocast_enabled(at::kCPU, true);
                             Tensor y = m(torch::randn({3, 6})).to(torch::kFloat).pow(2).mean();
                             at::autocast::clear_cache();
                             at::autocast::set_autocast_enabled(at::kCPU, false);
                             return y;
                           });
}

/// Modules that reach into each other's weights.
struct ReachImpl : Module {
  Linear a{nullptr}, b{nullptr};
  Tensor scale;
  ReachImpl() {
    a = register_module("a", Linear(6, 6));
    b = register_module("b", Linear(6, 6));
    scale = register_parameter("scale", torch::tensor(0.5));
  }
  Tensor forward(Tensor x) {
    Tensor h = torch::linear(x, b->weight.t(), a->bias) * scale;
    return a(h) + torch::matmul(b(h), a->weight) * b->weight.diagonal();
  }
};
TORCH_MODULE(Reach);

TEST(ModuleZoo, ModulesThatReachIntoEachOther) {
  expect_same_bits<Reach>([] { return Reach(); },
                          [](Reach& m) { return m->forward(torch::randn({3, 6})).pow(2).mean(); });
}

TEST(ModuleZoo, TransposedAndChannelsLastParameters) {
  struct OddImpl : Module {
    Tensor w, conv;
    OddImpl() {
      w = register_parameter("w", torch::randn({6, 4}).t());
      conv = register_parameter(
          "conv", torch::randn({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    }
  };
  struct Odd : ModuleHolder<OddImpl> {
    Odd() : ModuleHolder<OddImpl>(std::make_shared<OddImpl>()) {}
  };
  expect_same_bits<Odd>([] { return Odd(); },
                        [](Odd& m) {
                          Tensor y = torch::matmul(torch::randn({3, 4}), m->w);
                          Tensor z = torch::conv2d(torch::randn({2, 3, 5, 5}), m->conv);
                          return y.pow(2).mean() + z.pow(2).mean();
                        });
}

}  // namespace
}  // namespace fsdp2::testing
