#include "train/model_dir.h"

#include "checkpoint/file_io.h"
#include "train/hf_llama.h"
#include "train/weights.h"
#include "train/world.h"

#include <fsdp2/meta_device.h>

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>

namespace fsdp2::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string config_path(const std::string& folder) {
  return (fs::path(folder) / "config.json").string();
}

void load_into(Llama& model, const std::string& folder) {
  load_weights(*model, folder, {.name = hf_name, .passes_over = [&](const std::string& name) {
                                  return hf_passes_over(model->config(), name);
                                }});
}

std::string torch_name(torch::ScalarType dtype) {
  if (dtype == torch::kFloat32) return "float32";
  if (dtype == torch::kBFloat16) return "bfloat16";
  TORCH_CHECK_VALUE(dtype == torch::kFloat16, "models are written as float32, bfloat16 or float16");
  return "float16";
}

}  // namespace

Json read_hf_config(const std::string& folder) {
  const std::string path = config_path(folder);
  TORCH_CHECK_VALUE(fs::exists(path), "cannot read ", path, ": is ", folder,
                    " a folder that fsdp2 train or Hugging Face's save_pretrained wrote?");
  try {
    return Json::parse(files::read_all(path));
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, path, ": ", error.what());
  }
}

LlamaConfig read_config(const std::string& folder) {
  const Json fields = read_hf_config(folder);
  try {
    return llama_of_hf(fields);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, config_path(folder), ": ", error.what_without_backtrace());
  }
}

Llama load_model(const std::string& folder) {
  Llama model(read_config(folder));
  load_into(model, folder);
  return model;
}

Llama load_model(const std::string& folder, const ShardingOptions& sharding) {
  Llama model{nullptr};
  agree("cannot load the model", [&] {
    const LlamaConfig config = read_config(folder);
    const MetaDeviceGuard meta;
    model = Llama(config);
  });
  shard(model, sharding);
  to_empty(*model, sharding.offload ? torch::kCPU : get_device());
  load_into(model, folder);
  return model;
}

void save_model(const Llama& model, const std::string& folder, const SaveModelOptions& options) {
  Json fields = options.fields.is_null() ? hf_of_llama(model->config()) : options.fields;
  fields.erase("dtype");  // as transformers 5 calls it; it reads the older name too
  fields["torch_dtype"] = torch_name(options.dtype);
  save_weights(*model, folder,
               {.name = hf_name, .dtype = options.dtype, .most_bytes = options.most_bytes});
  agree("saving the model", [&] {
    if (get_rank() == 0) files::replace(config_path(folder), fields.dump(2) + "\n");
  });
}

void copy_tokenizer(const std::string& from, const std::string& to) {
  if (fs::equivalent(from, to)) return;
  const std::vector<std::string> others{"generation_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "vocab.json",
                                        "merges.txt"};
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file()) continue;
    if (name.starts_with("tokenizer") || std::count(others.begin(), others.end(), name) > 0) {
      fs::copy_file(entry.path(), fs::path(to) / name, fs::copy_options::overwrite_existing);
    }
  }
}

}  // namespace fsdp2::train
