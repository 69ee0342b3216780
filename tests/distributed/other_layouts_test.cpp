// Sparse, CSR, nested, quantised and complex tensors next to gathered parameters, and tensors built
// on parameters.

#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::other_layouts {
namespace {

using torch::Tensor;

class OtherLayouts : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OtherLayouts, ::testing::Values(1, 2));

using Loss = std::function<Tensor(const Tensor& w, const Tensor& bias, const Tensor& x)>;

struct SixImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  SixImpl() {
    a = register_module("a", torch::nn::Linear(6, 6));
    b = register_module("b", torch::nn::Linear(6, 6));
  }
};
TORCH_MODULE(Six);

/// Losses and gradients as in plain torch; everything is freed between the uses.
void expect_same_loss(const char* what, const Loss& loss) {
  SCOPED_TRACE(what);
  Twins<Six> twins;
  FullyShardOptions options;
  options.reshard_after_forward = true;
  fully_shard(twins.sharded->a, options);
  fully_shard(twins.sharded->b, options);
  fully_shard(twins.sharded, options);
  twins.backward([&](Six& m, int r) {
    torch::manual_seed(100 + r);
    Tensor x = torch::randn({6, 6});
    x.masked_fill_(x < 0.3, 0);
    Tensor first = loss(m->a->weight, m->a->bias, x);
    return first + loss(m->b->weight, m->b->bias, x) * m->a->bias.sum();
  });
  twins.expect_same(get_world_size() == 1 ? 0 : 2e-4);
}

Tensor small(const Tensor& x) { return x.view({-1}).narrow(0, 0, 8).view({4, 2}); }

TEST_P(OtherLayouts, SparseOperands) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss("mm", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return torch::mm(x.to_sparse(), w).pow(2).sum();
    });
    expect_same_loss("addmm", [](const Tensor& w, const Tensor& bias, const Tensor& x) {
      return torch::addmm(bias, x.to_sparse(), w.t()).pow(2).sum();
    });
    expect_same_loss("csr", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return torch::matmul(x.to_sparse_csr(), w).pow(2).sum();
    });
    expect_same_loss("mul", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return (x.to_sparse() * w).coalesce().values().pow(2).sum();
    });
    expect_same_loss("add", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return torch::add(w, x.to_sparse()).pow(2).sum();
    });
    expect_same_loss("sparse_mask", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return w.sparse_mask(x.to_sparse().coalesce()).coalesce().values().pow(2).sum();
    });
  });
}

TEST_P(OtherLayouts, SparseTensorsMadeOfParameters) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss("to_sparse", [](const Tensor& w, const Tensor&, const Tensor& x) {
      return torch::mm(w.to_sparse(), x).pow(2).sum();
    });
    const Tensor indices = torch::tensor({{0, 1, 2, 0, 3, 3}, {1, 0, 3, 2, 1, 2}});
    expect_same_loss("coo", [&](const Tensor& w, const Tensor&, const Tensor& x) {
      Tensor sparse = torch::sparse_coo_tensor(indices, w[0], {4, 4});
      return torch::mm(sparse, small(x)).pow(2).sum();
    });
    expect_same_loss("coo, unsafe", [&](const Tensor& w, const Tensor&, const Tensor& x) {
      Tensor sparse = at::_sparse_coo_tensor_unsafe(indices, w[0], {4, 4});
      return torch::mm(sparse, small(x)).pow(2).sum();
    });
    expect_same_loss("csr", [&](const Tensor& w, const Tensor&, const Tensor& x) {
      Tensor sparse = at::sparse_compressed_tensor(
          torch::tensor({0, 2, 3, 4, 6}), torch::tensor({0, 1, 2, 1, 0, 3}), w[0], {4, 4},
          torch::TensorOptions().dtype(torch::kFloat).layout(torch::kSparseCsr));
      return torch::matmul(sparse, small(x)).pow(2).sum();
    });
  });
}

TEST_P(OtherLayouts, NestedOperands) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss("linear", [](const Tensor& w, const Tensor& bias, const Tensor& x) {
      Tensor nested = at::_nested_tensor_from_mask(
          x.view({2, 3, 6}), torch::tensor({{true, true, true}, {true, true, false}}));
      return at::nested_to_padded_tensor(torch::linear(nested, w, bias), 0).pow(2).sum();
    });
  });
}

TEST_P(OtherLayouts, Quantisation) {
  on_ranks(GetParam(), [](int) {
    expect_same_loss("quantize", [](const Tensor& w, const Tensor&, const Tensor&) {
      Tensor per_channel =
          torch::quantize_per_channel(w.detach(), torch::full({6}, 0.1, torch::kDouble),
                                      torch::zeros({6}, torch::kLong), 0, torch::kQInt8);
      return torch::fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127).pow(2).sum() +
             torch::quantize_per_tensor(w.detach(), 0.1, 0, torch::kQInt8).dequantize().sum() +
             per_channel.dequantize().sum();
    });
  });
}

TEST_P(OtherLayouts, SparseGradientOfAnEmbedding) {
  on_ranks(GetParam(), [](int) {
    Twins<torch::nn::Embedding> twins(torch::nn::EmbeddingOptions(7, 3).sparse(true));
    fully_shard(twins.sharded);
    for (int step = 0; step < 2; ++step) {
      twins.backward([](torch::nn::Embedding& m, int r) {
        return m(torch::tensor({r, 1, 2, 1, 6 - r})).pow(2).sum();
      });
    }
    const Tensor ours = full(twins.sharded->parameters()[0].grad());
    EXPECT_LE(difference(ours, twins.plain->weight.grad().to_dense()), 1e-6);
    torch::optim::SGD plain(twins.plain->parameters(), 0.1), sgd(twins.sharded->parameters(), 0.1);
    plain.step();
    sgd.step();
    twins.expect_same(1e-6, /*gradients=*/false);
  });
}

struct ComplexImpl : torch::nn::Module {
  Tensor w, scale, empty;
  ComplexImpl() {
    w = register_parameter("w", torch::randn({5, 5}, torch::kComplexFloat));
    scale = register_parameter("scale", torch::tensor(2.0));
    empty = register_parameter("empty", torch::zeros({0, 3}));
  }
};
TORCH_MODULE(Complex);

TEST_P(OtherLayouts, ComplexScalarAndEmptyParameters) {
  on_ranks(GetParam(), [](int) {
    Twins<Complex> twins;
    fully_shard(twins.sharded);
    for (int step = 0; step < 2; ++step) {
      twins.backward([&](Complex& m, int r) {
        torch::manual_seed(100 + r);
        Tensor x = torch::randn({5, 5}, torch::kComplexFloat);
        Tensor conjugate = m->w.conj();
        if (is_fsdp(*m)) as_fsdp(*m).reshard();
        Tensor y = torch::mm(x, conjugate) + torch::mm(m->w.mH(), x) +
                   torch::view_as_real(m->w).sum() + torch::real(m->w) + torch::imag(m->w).exp() +
                   conjugate.resolve_conj();
        return y.abs().pow(2).sum() * m->scale + torch::cat({m->empty, torch::ones({1, 3})}).sum();
      });
      twins.expect_same(get_world_size() == 1 ? 0 : 2e-3);
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::other_layouts
