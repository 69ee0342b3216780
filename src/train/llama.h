#pragma once

// A Llama-style decoder from plain torch::nn modules: RMSNorm, rotary positions (rotate-half),
// grouped-query attention, SwiGLU. It knows nothing of sharding.

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <optional>
#include <string>

namespace fsdp2::train {

/// Positions beyond those that a model was first trained on, as of Llama 3.1: waves longer than
/// `positions` / `low` are slowed down by `factor`, those shorter than `positions` / `high` are
/// left alone, and what is between is blended.
struct RotaryScaling {
  double factor = 8, low = 1, high = 4;
  int64_t positions = 8192;
};

struct RotaryOptions {
  double theta = 10000;
  std::optional<RotaryScaling> scaling{};
};

struct LlamaConfig {
  int64_t dim = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t ffn = 0;       // 0: 8/3 of dim, rounded up to a multiple of 64
  int64_t vocab = 256;
  int64_t seq = 128;  // the longest input
  bool tied = false;  // the output head is the embedding
  double norm_eps = 1e-5;
  RotaryOptions rotary{};

  int64_t head_dim() const { return dim / heads; }
};

/// Fills in what is derived. Error naming the field if the sizes do not make a model.
LlamaConfig resolve(LlamaConfig config);

class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(int64_t dim, double eps);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

/// cos and sin of every position and frequency, each [seq, 1, head_dim / 2]; on the CPU.
struct Rotary {
  torch::Tensor cos, sin;
};
Rotary make_rotary(int64_t head_dim, int64_t seq, const RotaryOptions& options = {});
/// x [batch, seq, heads, head_dim], rotated.
torch::Tensor apply_rotary(const torch::Tensor& x, const Rotary& rotary);

class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotary& rotary);

  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};

 private:
  int64_t heads_, kv_heads_, head_dim_;
};
TORCH_MODULE(Attention);

class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TORCH_MODULE(FeedForward);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotary& rotary);

  RMSNorm attention_norm{nullptr};
  Attention attention{nullptr};
  RMSNorm ffn_norm{nullptr};
  FeedForward feed_forward{nullptr};
};
TORCH_MODULE(Block);

class LlamaImpl : public torch::nn::Module {
 public:
  /// `config` is resolved. Parameters hold arbitrary values until init_weights.
  explicit LlamaImpl(const LlamaConfig& config);
  /// tokens [batch, seq] (int64) -> logits [batch, seq, vocab].
  torch::Tensor forward(const torch::Tensor& tokens);
  const LlamaConfig& config() const { return config_; }

  torch::nn::Embedding tok_embeddings{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RMSNorm norm{nullptr};
  torch::nn::Linear output{nullptr};  // empty when tied

 private:
  LlamaConfig config_;
  Rotary rotary_;
};
TORCH_MODULE(Llama);

/// Mean cross entropy, in nats a token, of `model` reading `x` and predicting `y`; computed in
/// float32.
torch::Tensor next_token_loss(Llama& model, const torch::Tensor& x, const torch::Tensor& y);
/// The same of what it returned.
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& y);

}  // namespace fsdp2::train
