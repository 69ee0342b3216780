// Folders of Hugging Face's Llama: names, what config.json may ask for, what a run takes over.
// tests/parity/hf_parity.py holds the numbers against transformers.

#include "train/hf_llama.h"

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/train_world.h"
#include "train/init.h"
#include "train/model_dir.h"
#include "train/trainer.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>

namespace fsdp2::train::hf_llama_test {
namespace {

using fsdp2::testing::error_of;
using fsdp2::testing::on_processes;
using fsdp2::testing::on_ranks;
using fsdp2::testing::on_world;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

LlamaConfig small(int64_t vocab = 259) {
  return resolve({.dim = 12,
                  .layers = 2,
                  .heads = 3,
                  .kv_heads = 1,
                  .ffn = 17,
                  .vocab = vocab,
                  .seq = 16,
                  .norm_eps = 1e-3,
                  .rotary = {.theta = 500, .scaling = RotaryScaling{.positions = 8}}});
}

/// A folder with a small model, and the model.
Llama write(const std::string& folder, const Json& more = Json::object()) {
  Llama model(small());
  init_weights(*model, 7, 2);
  std::filesystem::create_directories(folder);
  Json fields = hf_of_llama(model->config());
  fields.update(more);
  save_model(model, folder, {.fields = fields});
  return model;
}

void expect_same(Llama& a, Llama& b) {
  const auto wanted = b->named_parameters();
  for (const auto& item : a->named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), wanted[item.key()])) << item.key();
}

TEST(HfLlama, NamesEveryParameter) {
  EXPECT_EQ(hf_name("tok_embeddings.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(hf_name("norm.weight"), "model.norm.weight");
  EXPECT_EQ(hf_name("output.weight"), "lm_head.weight");
  EXPECT_EQ(hf_name("layers.31.attention_norm.weight"), "model.layers.31.input_layernorm.weight");
  EXPECT_EQ(hf_name("layers.0.feed_forward.w2.weight"), "model.layers.0.mlp.down_proj.weight");
  std::set<std::string> names;
  for (const auto& item : Llama(small())->named_parameters()) names.insert(hf_name(item.key()));
  EXPECT_EQ(names.size(), 21);
  EXPECT_THAT(error_of([] { hf_name("layers.0.attention.wz.weight"); }), HasSubstr("wz"));
}

TEST(HfLlama, ConfigGoesBothWays) {
  const LlamaConfig config = small();
  const LlamaConfig back = llama_of_hf(hf_of_llama(config));
  EXPECT_EQ(hf_of_llama(back), hf_of_llama(config));
  EXPECT_EQ(back.kv_heads, 1);
  EXPECT_EQ(back.rotary.theta, 500);
  ASSERT_TRUE(back.rotary.scaling.has_value());
}

TEST(HfLlama, ReadsBothPlacesOfRotaryFields) {
  Json fields = hf_of_llama(small());
  fields.erase("rope_theta");
  fields["rope_scaling"] = nullptr;
  EXPECT_EQ(llama_of_hf(fields).rotary.theta, 10000);
  fields["rope_parameters"] = {{"rope_theta", 7}, {"rope_type", "default"}};
  EXPECT_EQ(llama_of_hf(fields).rotary.theta, 7);
  EXPECT_FALSE(llama_of_hf(fields).rotary.scaling.has_value());
}

TEST(HfLlama, FieldsThatAskForMoreAreRefusedByName) {
  const auto error_with = [](const char* field, const Json& value) {
    Json fields = hf_of_llama(small());
    fields[field] = value;
    return error_of([&] { llama_of_hf(fields); });
  };
  const std::pair<const char*, Json> refused[] = {
      {"model_type", "qwen2"},
      {"architectures", Json::array({"LlamaForSequenceClassification"})},
      {"hidden_act", "gelu"},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"attention_dropout", 0.1},
      {"head_dim", 8},
      {"quantization_config", {{"bits", 4}}},
      {"hidden_size", nullptr},
      {"vocab_size", "many"},
      {"num_attention_heads", 2.5}};
  for (const auto& [field, value] : refused) {
    EXPECT_THAT(error_with(field, value), HasSubstr(field)) << value;
  }
  EXPECT_THAT(error_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}),
              AllOf(HasSubstr("rope_scaling"), HasSubstr("\"linear\"")));
  EXPECT_THAT(error_with("rope_scaling", {{"rope_type", "llama3"}, {"factor", 2}}),
              HasSubstr("low_freq_factor is missing"));
  EXPECT_THAT(error_with("num_key_value_heads", 2), HasSubstr("kv-heads 2"));
  EXPECT_EQ(error_with("head_dim", 4), "");
  EXPECT_EQ(error_with("head_dim", nullptr), "");
  EXPECT_EQ(error_with("attention_dropout", 0.0), "");
}

TEST(HfLlama, TensorsThatTransformersPassesOverAreNoError) {
  const TemporaryFolder folder;
  on_processes(1, [&](int) {
    Llama model = write(folder.path("a"));
    const safetensors::Reader reader(folder.path("a/model.safetensors"));
    std::vector<std::pair<std::string, torch::Tensor>> tensors;
    for (const auto& entry : reader.entries())
      tensors.emplace_back(entry.name, reader.read(entry.name).clone());
    tensors.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq", torch::ones({2}));
    safetensors::save(folder.path("a/model.safetensors"), tensors);
    Llama back = load_model(folder.path("a"));
    expect_same(back, model);
    tensors.emplace_back("model.layers.0.self_attn.q_proj.bias", torch::ones({12}));
    safetensors::save(folder.path("a/model.safetensors"), tensors);
    EXPECT_THAT(error_of([&] { load_model(folder.path("a")); }),
                HasSubstr("no parameter called model.layers.0.self_attn.q_proj.bias"));
  });
}

TEST(HfLlama, ShardedLoadsHoldAPartAndTheWholeIsTheModel) {
  const TemporaryFolder folder;
  on_processes(1, [&](int) { write(folder.path("a")); });
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](int) {
      Llama model = load_model(folder.path("a"), ShardingOptions{});
      Llama whole = load_model(folder.path("a"));
      const auto wanted = whole->named_parameters();
      int64_t held = 0;
      for (const auto& item : model->named_parameters()) {
        const DTensor sharded(item.value());
        held += sharded.to_local().numel();
        EXPECT_TRUE(torch::equal(sharded.full_tensor(), wanted[item.key()])) << item.key();
      }
      EXPECT_LT(held, 8268 / ranks + 200);  // of 8268 in all
    });
  }
}

TEST(HfLlama, ARunTakesOverWhatTheFolderSays) {
  const TemporaryFolder folder;
  on_processes(1, [&](int) { write(folder.path("a"), {{"eos_token_id", 77}, {"mine", {1, 2}}}); });
  folder.write("a/tokenizer.json", "{}");
  folder.write("a/generation_config.json", "{\"x\": 1}");
  folder.write("a/notes.txt", "not of the model");
  folder.write("text/t.txt", std::string(400, 'x') + std::string(400, 'y'));
  on_world(folder, 2, [&](const World& world) {
    TrainOptions options;
    options.from = folder.path("a");
    options.out = folder.path("b");
    options.seq = 8;
    options.data.paths = {folder.path("text")};
    options.batch = 2;
    options.schedule = {.peak = 0, .warmup = 0, .steps = 1};
    options.val_batches = 1;
    options.seq = 17;
    EXPECT_THAT(error_of([&] { train(options, world); }), HasSubstr("the model takes 16 tokens"));
    options.seq = 8;
    train(options, world);
  });
  const Json was = read_hf_config(folder.path("a"));
  Json expected = was;
  expected.erase("dtype");
  expected["torch_dtype"] = "float32";
  EXPECT_EQ(read_hf_config(folder.path("b")), expected);
  on_processes(1, [&](int) {
    Llama before = load_model(folder.path("a")), after = load_model(folder.path("b"));
    expect_same(after, before);
  });
  EXPECT_TRUE(std::filesystem::exists(folder.path("b/tokenizer.json")));
  EXPECT_TRUE(std::filesystem::exists(folder.path("b/generation_config.json")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("b/notes.txt")));
}

}  // namespace
}  // namespace fsdp2::train::hf_llama_test
