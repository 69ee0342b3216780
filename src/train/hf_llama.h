#pragma once

// Hugging Face's Llama (`LlamaForCausalLM` of transformers): what its config.json and its weights
// call the parts of the decoder in llama.h. The two compute the same, so names are all that
// differs.

#include "train/llama.h"

#include <nlohmann/json.hpp>
#include <string>

namespace fsdp2::train {

/// A parameter's name there: "model.layers.0.self_attn.q_proj.weight" of
/// "layers.0.attention.wq.weight".
std::string hf_name(const std::string& name);

/// Whether files may have a tensor of this name that the model has no parameter for: transformers
/// passes over it too.
bool hf_passes_over(const LlamaConfig& config, const std::string& name);

/// Of the fields of config.json. Error naming the field that is missing, that has another type, or
/// that asks for what the decoder does not compute.
LlamaConfig llama_of_hf(const nlohmann::ordered_json& fields);

/// The fields for a model over bytes that was not made from such a folder.
nlohmann::ordered_json hf_of_llama(const LlamaConfig& config);

}  // namespace fsdp2::train
