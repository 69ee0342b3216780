#pragma once

// A trained model in a folder: model.safetensors and config.json.

#include "train/llama.h"

#include <string>

namespace fsdp2::train {

/// Collective; rank 0 writes. `folder` exists. A file takes its name only once it is complete.
void save_model(const Llama& model, const std::string& folder);
/// Errors name the file and what is wrong with it.
Llama load_model(const std::string& folder);

}  // namespace fsdp2::train
