#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

namespace fsdp2::train {
struct LlamaConfig;
struct ShardingOptions;
}  // namespace fsdp2::train

namespace fsdp2::cli {

/// Sets `value` to a preset's, unless the command line has `name`.
template <class T>
void take_preset(const CLI::App& command, const char* name, T& value, const T& preset) {
  if (command.count(name) == 0) value = preset;
}

/// --preset, with its names from a map of presets.
template <class Presets>
void add_preset_option(CLI::App& command, std::string& preset, const Presets& presets) {
  std::vector<std::string> names;
  names.reserve(presets.size());
  for (const auto& item : presets) names.push_back(item.first);
  command.add_option("--preset", preset, "Sizes that the options below change")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
}

/// The sizes of a decoder: --dim, --layers, --heads, --kv-heads, --ffn, --seq and --tied.
void add_model_options(CLI::App& command, train::LlamaConfig& model);

/// How the decoder is sharded, --param-dtype and --reduce-dtype included.
void add_sharding_options(CLI::App& command, train::ShardingOptions& sharding);

/// --param-dtype and --reduce-dtype.
void add_precision_options(CLI::App& command, std::string& param_dtype, std::string& reduce_dtype);

/// Takes the sizes that the command line does not have from the preset.
void take_model_preset(const CLI::App& command, train::LlamaConfig& model,
                       const train::LlamaConfig& preset);

}  // namespace fsdp2::cli
