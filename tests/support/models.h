#pragma once

// Small models that tests share.

#include <torch/torch.h>

namespace fsdp2::testing {

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  explicit BlockImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    a = register_module("a", torch::nn::Linear(dim, 2 * dim + 1));
    b = register_module("b", torch::nn::Linear(2 * dim + 1, dim));
  }
  torch::Tensor forward(torch::Tensor x) { return x + b(torch::gelu(a(norm(x)))); }
};
TORCH_MODULE(Block);

/// Embedding, blocks, head. Vocabulary 11 and dimension 6: nothing divides by 2, 3 and 4 alike.
struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
  explicit NetImpl(int64_t depth = 3, int64_t dim = 6, int64_t vocabulary = 11) {
    embedding = register_module("embedding", torch::nn::Embedding(vocabulary, dim));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(dim));
    head = register_module("head", torch::nn::Linear(dim, vocabulary));
  }
  torch::Tensor forward(torch::Tensor ids) {
    torch::Tensor h = embedding(ids);
    for (auto& block : *blocks) h = block->as<BlockImpl>()->forward(h);
    return head(h);
  }
  torch::Tensor loss(const torch::Tensor& ids, const torch::Tensor& targets) {
    return torch::nn::functional::cross_entropy(
        forward(ids).view({-1, head->options.out_features()}), targets.reshape({-1}));
  }
};
TORCH_MODULE(Net);

}  // namespace fsdp2::testing
