#pragma once

// A model in a folder, as Hugging Face's transformers write and read it: config.json, and the
// weights as model.safetensors or as several files with model.safetensors.index.json.

#include "train/llama.h"
#include "train/sharding.h"

#include <nlohmann/json.hpp>
#include <string>

namespace fsdp2::train {

/// The fields of its config.json. Errors name the file.
nlohmann::ordered_json read_hf_config(const std::string& folder);
/// The same as a decoder's configuration. Errors name the file and the field.
LlamaConfig read_config(const std::string& folder);

/// Whole, in this process; collective if it is in a world. Errors name the file and what is wrong
/// with it. Weights are converted to float32.
Llama load_model(const std::string& folder);
/// Sharded over the world, without ever being whole anywhere. Collective.
Llama load_model(const std::string& folder, const ShardingOptions& sharding);

struct SaveModelOptions {
  torch::ScalarType dtype = torch::kFloat32;  // of the weights
  uint64_t most_bytes = 5'000'000'000;        // a file
  /// What config.json shall say beside the dtype: the fields of the folder that the model was
  /// loaded from. Null: what a model over bytes has.
  nlohmann::ordered_json fields{};
};
/// Collective. `folder` exists. A file takes its name only once it is complete.
void save_model(const Llama& model, const std::string& folder,
                const SaveModelOptions& options = {});

/// Copies the files of a tokenizer and of generation, if `from` has any.
void copy_tokenizer(const std::string& from, const std::string& to);

}  // namespace fsdp2::train
