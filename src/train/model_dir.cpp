#include "train/model_dir.h"

#include "train/weights.h"
#include "train/world.h"

#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace fsdp2::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kArchitecture = "llama-bytes";

Json to_json(const LlamaConfig& config) {
  return {{"architecture", kArchitecture}, {"dim", config.dim},           {"layers", config.layers},
          {"heads", config.heads},         {"kv_heads", config.kv_heads}, {"ffn", config.ffn},
          {"vocab", config.vocab},         {"seq", config.seq},           {"tied", config.tied}};
}

LlamaConfig from_json(const Json& json) {
  LlamaConfig config;
  json.at("dim").get_to(config.dim);
  json.at("layers").get_to(config.layers);
  json.at("heads").get_to(config.heads);
  json.at("kv_heads").get_to(config.kv_heads);
  json.at("ffn").get_to(config.ffn);
  json.at("vocab").get_to(config.vocab);
  json.at("seq").get_to(config.seq);
  json.at("tied").get_to(config.tied);
  return resolve(config);
}

}  // namespace

void save_model(const Llama& model, const std::string& folder) {
  const fs::path root(folder);
  save_weights(*model, root / "model.safetensors", {{"format", "pt"}});
  agree("saving the model", [&] {
    if (get_rank() != 0) return;
    const fs::path final_name = root / "config.json", temporary = root / "config.json.tmp";
    std::ofstream file(temporary);
    file << to_json(model->config()).dump(2) << std::endl;
    TORCH_CHECK(file.good(), "cannot write ", temporary.string());
    file.close();
    fs::rename(temporary, final_name);
  });
}

Llama load_model(const std::string& folder) {
  const fs::path root(folder);
  const auto path = (root / "config.json").string();
  std::ifstream file(path);
  TORCH_CHECK_VALUE(file.good(), "cannot read ", path, ": is ", folder,
                    " a folder that fsdp2 train wrote?");
  LlamaConfig config;
  try {
    const auto json = Json::parse(file);
    TORCH_CHECK_VALUE(json.at("architecture") == kArchitecture, path, ": the architecture is ",
                      json.at("architecture").dump(), ", not \"", kArchitecture, "\"");
    config = from_json(json);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, path, ": ", error.what());
  }
  Llama model(config);
  load_weights(*model, root / "model.safetensors");
  return model;
}

}  // namespace fsdp2::train
