#pragma once

#include <string>

namespace fsdp2::cli {

/// From a checkpoint's folder or a .safetensors file to a .safetensors file, a .pt file
/// (torch.save) or a checkpoint's folder, tensor by tensor where the format allows it. Only keys
/// that start with `prefix`, which is left out in a .safetensors file ("train.model."). Errors name
/// the file.
void convert_checkpoint(const std::string& from, const std::string& to, const std::string& prefix);

}  // namespace fsdp2::cli
