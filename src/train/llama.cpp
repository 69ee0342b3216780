#include "train/llama.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

namespace fsdp2::train {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

/// On the CPU, also while a model is built without memory: the tables have to be there after it.
torch::Tensor on_cpu(std::vector<double> values) {
  return torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}, torch::kFloat64)
      .clone();
}

double scaled(double frequency, const RotaryScaling& scaling) {
  const double waves = static_cast<double>(scaling.positions) * frequency / (2 * std::numbers::pi);
  const double kept = std::clamp((waves - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0);
  return frequency * ((1 - kept) / scaling.factor + kept);
}

}  // namespace

LlamaConfig resolve(LlamaConfig config) {
  const std::pair<const char*, int64_t> sizes[] = {{"dim", config.dim},
                                                   {"layers", config.layers},
                                                   {"heads", config.heads},
                                                   {"vocab", config.vocab},
                                                   {"seq", config.seq}};
  for (const auto& [name, size] : sizes) {
    TORCH_CHECK_VALUE(size > 0, "model: ", name, " must be at least 1, got ", size);
  }
  TORCH_CHECK_VALUE(config.kv_heads >= 0, "model: kv-heads must not be negative, got ",
                    config.kv_heads);
  TORCH_CHECK_VALUE(config.ffn >= 0, "model: ffn must not be negative, got ", config.ffn);
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.ffn == 0) config.ffn = (8 * config.dim / 3 + 63) / 64 * 64;
  TORCH_CHECK_VALUE(config.dim % config.heads == 0, "model: dim ", config.dim,
                    " is not a multiple of heads ", config.heads);
  TORCH_CHECK_VALUE(config.head_dim() % 2 == 0,
                    "model: rotary positions need an even dim / heads, got ", config.head_dim());
  TORCH_CHECK_VALUE(config.heads % config.kv_heads == 0, "model: heads ", config.heads,
                    " is not a multiple of kv-heads ", config.kv_heads);
  TORCH_CHECK_VALUE(config.norm_eps > 0, "model: norm-eps must be above 0, got ", config.norm_eps);
  TORCH_CHECK_VALUE(config.rotary.theta > 0, "model: the rotary base must be above 0, got ",
                    config.rotary.theta);
  if (config.rotary.scaling) {
    const RotaryScaling& scaling = *config.rotary.scaling;
    TORCH_CHECK_VALUE(scaling.factor > 0 && scaling.low > 0 && scaling.high > scaling.low &&
                          scaling.positions > 0,
                      "model: the rotary scaling makes no sense: factor ", scaling.factor, ", low ",
                      scaling.low, ", high ", scaling.high, ", positions ", scaling.positions);
  }
  return config;
}

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", torch::ones({dim}));
}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, {x.size(-1)}, weight, eps_);
}

Rotary make_rotary(int64_t head_dim, int64_t seq, const RotaryOptions& options) {
  std::vector<double> positions(seq), frequencies(head_dim / 2);
  std::iota(positions.begin(), positions.end(), 0.0);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double turn = 2 * static_cast<double>(i) / static_cast<double>(head_dim);
    frequencies[i] = std::pow(options.theta, -turn);
    if (options.scaling) frequencies[i] = scaled(frequencies[i], *options.scaling);
  }
  const auto angle = torch::outer(on_cpu(std::move(positions)), on_cpu(std::move(frequencies)));
  return {angle.cos().to(torch::kFloat32).unsqueeze(1),
          angle.sin().to(torch::kFloat32).unsqueeze(1)};
}

torch::Tensor apply_rotary(const torch::Tensor& x, const Rotary& rotary) {
  const auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * rotary.cos - halves[1] * rotary.sin,
                     halves[1] * rotary.cos + halves[0] * rotary.sin},
                    -1);
}

AttentionImpl::AttentionImpl(const LlamaConfig& config)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.head_dim()) {
  wq = register_module("wq", linear(config.dim, heads_ * head_dim_));
  wk = register_module("wk", linear(config.dim, kv_heads_ * head_dim_));
  wv = register_module("wv", linear(config.dim, kv_heads_ * head_dim_));
  wo = register_module("wo", linear(heads_ * head_dim_, config.dim));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const Rotary& rotary) {
  const int64_t batch = x.size(0), seq = x.size(1);
  auto q =
      apply_rotary(wq->forward(x).view({batch, seq, heads_, head_dim_}), rotary).transpose(1, 2);
  auto k =
      apply_rotary(wk->forward(x).view({batch, seq, kv_heads_, head_dim_}), rotary).transpose(1, 2);
  auto v = wv->forward(x).view({batch, seq, kv_heads_, head_dim_}).transpose(1, 2);
  if (kv_heads_ != heads_) {
    k = k.repeat_interleave(heads_ / kv_heads_, 1);
    v = v.repeat_interleave(heads_ / kv_heads_, 1);
  }
  const auto out = torch::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                       /*is_causal=*/true);
  return wo->forward(out.transpose(1, 2).reshape({batch, seq, heads_ * head_dim_}));
}

FeedForwardImpl::FeedForwardImpl(const LlamaConfig& config) {
  w1 = register_module("w1", linear(config.dim, config.ffn));
  w2 = register_module("w2", linear(config.ffn, config.dim));
  w3 = register_module("w3", linear(config.dim, config.ffn));
}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) {
  return w2->forward(torch::silu(w1->forward(x)) * w3->forward(x));
}

BlockImpl::BlockImpl(const LlamaConfig& config) {
  attention_norm = register_module("attention_norm", RMSNorm(config.dim, config.norm_eps));
  attention = register_module("attention", Attention(config));
  ffn_norm = register_module("ffn_norm", RMSNorm(config.dim, config.norm_eps));
  feed_forward = register_module("feed_forward", FeedForward(config));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x, const Rotary& rotary) {
  const auto h = x + attention->forward(attention_norm->forward(x), rotary);
  return h + feed_forward->forward(ffn_norm->forward(h));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config)
    : config_(config), rotary_(make_rotary(config.head_dim(), config.seq, config.rotary)) {
  tok_embeddings =
      register_module("tok_embeddings", torch::nn::Embedding(config.vocab, config.dim));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(Block(config));
  norm = register_module("norm", RMSNorm(config.dim, config.norm_eps));
  if (!config.tied) output = register_module("output", linear(config.dim, config.vocab));
}

torch::Tensor LlamaImpl::forward(const torch::Tensor& tokens) {
  const int64_t seq = tokens.size(1);
  TORCH_CHECK_VALUE(seq <= config_.seq, "input of ", seq, " tokens, but the model was made for ",
                    config_.seq);
  auto h = tok_embeddings->forward(tokens);
  const auto like = h.options().requires_grad(false);
  const Rotary rotary{rotary_.cos.narrow(0, 0, seq).to(like),
                      rotary_.sin.narrow(0, 0, seq).to(like)};
  for (const auto& layer : *layers) h = layer->as<Block>()->forward(h, rotary);
  h = norm->forward(h);
  return config_.tied ? torch::linear(h, tok_embeddings->weight) : output->forward(h);
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& y) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat).view({-1, logits.size(-1)}),
                                              y.view(-1));
}

torch::Tensor next_token_loss(Llama& model, const torch::Tensor& x, const torch::Tensor& y) {
  return next_token_loss(model->forward(x), y);
}

}  // namespace fsdp2::train
