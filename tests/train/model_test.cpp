// The decoder, its initial weights and the synthetic tokens, against numbers worked out from their
// definitions.

#include "support/errors.h"
#include "support/tensors.h"
#include "train/init.h"
#include "train/llama.h"
#include "train/tokens.h"

#include <fsdp2/meta_device.h>

#include <torch/torch.h>

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::train {
namespace {

using ::fsdp2::testing::list_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of_model(const LlamaConfig& config) {
  return fsdp2::testing::error_of([&] { resolve(config); });
}

TEST(Init, FollowsTheFormulaAnywhereInAParameter) {
  const auto expect = [](const torch::Tensor& values, const std::vector<float>& expected) {
    EXPECT_TRUE(torch::equal(values, torch::tensor(expected))) << values;
  };
  expect(init_values("tok_embeddings.weight", 1234, 0, 3, 4),
         {0x1.d95572p-8F, 0x1.5b9886p-6F, -0x1.04e81cp-5F});
  // Into the residual stream: smaller.
  expect(init_values("layers.1.attention.wo.weight", 1234, 127, 2, 4),
         {-0x1.b7e4d8p-8F, -0x1.5dbf3ep-8F});
  // Far into a large parameter.
  expect(init_values("layers.0.feed_forward.w1.weight", 7, 10'000'000'000, 2, 4),
         {0x1.c3a27ap-8F, -0x1.bcb3aap-6F});
  expect(init_values("layers.3.ffn_norm.weight", 7, 5, 2, 4), {1, 1});
}

TEST(Init, FillsAllParametersOfAModel) {
  Llama model(resolve({.dim = 8, .layers = 2, .heads = 2, .vocab = 11, .seq = 4}));
  init_weights(*model, 1234, 2);
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value().flatten(),
                             init_values(item.key(), 1234, 0, item.value().numel(), 2)))
        << item.key();
  }
}

TEST(SyntheticTokens, FollowTheFormula) {
  const auto batch = synthetic_batch(/*seed=*/1234, /*micro=*/3, /*rank=*/2, /*batch=*/2, /*seq=*/5,
                                     /*vocab=*/1000);
  EXPECT_THAT(list_of(batch.x), ElementsAre(227, 152, 327, 652, 488, 356, 797, 973, 882, 830));
  EXPECT_THAT(list_of(batch.y), ElementsAre(152, 327, 652, 488, 457, 797, 973, 882, 830, 167));
}

TEST(Llama, NamesItsParametersInOrder) {
  Llama model(resolve({.dim = 8, .layers = 1, .heads = 4, .kv_heads = 2, .vocab = 11, .seq = 4}));
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters()) names.push_back(item.key());
  EXPECT_THAT(names,
              ElementsAre("tok_embeddings.weight", "layers.0.attention_norm.weight",
                          "layers.0.attention.wq.weight", "layers.0.attention.wk.weight",
                          "layers.0.attention.wv.weight", "layers.0.attention.wo.weight",
                          "layers.0.ffn_norm.weight", "layers.0.feed_forward.w1.weight",
                          "layers.0.feed_forward.w2.weight", "layers.0.feed_forward.w3.weight",
                          "norm.weight", "output.weight"));
  const auto parameters = model->named_parameters();
  EXPECT_THAT(parameters["layers.0.attention.wk.weight"].sizes().vec(), ElementsAre(4, 8));
  EXPECT_THAT(parameters["layers.0.feed_forward.w2.weight"].sizes().vec(), ElementsAre(8, 64));
}

TEST(Llama, TiedHeadIsTheEmbedding) {
  Llama model(resolve({.dim = 8, .layers = 1, .heads = 2, .vocab = 11, .seq = 4, .tied = true}));
  EXPECT_FALSE(model->named_parameters().contains("output.weight"));
  init_weights(*model, 1, 1);
  next_token_loss(model, torch::tensor({{1, 2}}), torch::tensor({{2, 3}})).backward();
  // Word 7 is never read: its gradient comes from the head.
  EXPECT_GT(model->tok_embeddings->weight.grad()[7].norm().item<double>(), 0);
}

TEST(Llama, SeesOnlyThePast) {
  const torch::NoGradGuard no_grad;
  Llama model(resolve({.dim = 8, .layers = 2, .heads = 4, .kv_heads = 2, .vocab = 11, .seq = 4}));
  init_weights(*model, 1, 2);
  const auto one = model->forward(torch::tensor({{1, 2, 3, 4}})),
             other = model->forward(torch::tensor({{1, 2, 3, 9}}));
  EXPECT_TRUE(torch::equal(one.narrow(1, 0, 3), other.narrow(1, 0, 3)));
  EXPECT_FALSE(torch::equal(one, other));
  EXPECT_TRUE(torch::allclose(one.narrow(1, 0, 2), model->forward(torch::tensor({{1, 2}}))));
}

TEST(Llama, RotaryTurnsEachPairByPositionTimesFrequency) {
  const auto rotary = make_rotary(4, 3);
  const auto x = torch::tensor({1.0F, 2.0F, 3.0F, 4.0F}).view({1, 1, 1, 4}).expand({1, 3, 1, 4});
  const auto turned = apply_rotary(x, rotary)[0][2][0];
  for (const int j : {0, 1}) {  // pairs (0, 2) and (1, 3); frequencies 1 and 1/100
    const double angle = 2 * (j == 0 ? 1.0 : 0.01), a = 1 + j, b = 3 + j;
    EXPECT_NEAR(turned[j].item<double>(), a * std::cos(angle) - b * std::sin(angle), 1e-6);
    EXPECT_NEAR(turned[j + 2].item<double>(), b * std::cos(angle) + a * std::sin(angle), 1e-6);
  }
}

TEST(Llama, RotarySlowsLongWavesDown) {
  // Frequencies 1, 1/10, 1/100, 1/1000; waves in 100 positions: 15.9, 1.59, 0.159, 0.0159.
  const RotaryOptions options{
      .theta = 1e4, .scaling = RotaryScaling{.factor = 4, .low = 1, .high = 5, .positions = 100}};
  const auto sin = make_rotary(8, 2, options).sin[1][0];
  const double blended = (100 / (20 * M_PI) - 1) / 4;
  const double expected[] = {1, 0.1 * ((1 - blended) / 4 + blended), 0.01 / 4, 0.001 / 4};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(sin[i].item<double>(), std::sin(expected[i]), 1e-7) << i;
}

TEST(Llama, RotaryTablesAreThereInAModelBuiltWithoutMemory) {
  Llama model = [] {
    const MetaDeviceGuard meta;
    return Llama(resolve({.dim = 8, .layers = 1, .heads = 2, .vocab = 11, .seq = 4}));
  }();
  to_empty(*model, torch::kCPU);
  init_weights(*model, 1, 1);
  Llama plain(model->config());
  init_weights(*plain, 1, 1);
  const auto tokens = torch::tensor({{1, 2, 3, 4}});
  EXPECT_TRUE(torch::equal(model->forward(tokens), plain->forward(tokens)));
}

TEST(LlamaConfig, DerivesWhatIsNotGiven) {
  const auto config = resolve({.dim = 128, .heads = 4});
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.ffn, 384);
}

TEST(LlamaConfig, NamesTheSizeThatIsWrong) {
  EXPECT_THAT(error_of_model({.dim = 10, .heads = 4}),
              HasSubstr("dim 10 is not a multiple of heads 4"));
  EXPECT_THAT(error_of_model({.dim = 12, .heads = 4}), HasSubstr("even dim / heads, got 3"));
  EXPECT_THAT(error_of_model({.heads = 4, .kv_heads = 3}),
              HasSubstr("heads 4 is not a multiple of kv-heads 3"));
  EXPECT_THAT(error_of_model({.layers = 0}), HasSubstr("layers must be at least 1"));
  EXPECT_THAT(error_of_model({.ffn = -1}), HasSubstr("ffn"));
}

}  // namespace
}  // namespace fsdp2::train
