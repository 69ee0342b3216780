#include "cli/ckpt_convert.h"

#include <fsdp2/dcp.h>
#include <fsdp2/safetensors.h>

#include <c10/util/Exception.h>

#include <filesystem>

namespace fsdp2::cli {
namespace {

bool is_safetensors(const std::string& path) { return path.ends_with(".safetensors"); }
bool is_torch_file(const std::string& path) {
  return path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".bin");
}

bool is_in_bucket(const std::string& path) { return path.starts_with("s3://"); }
bool is_folder(const std::string& path) {
  return is_in_bucket(path) || std::filesystem::is_directory(path);
}

/// Tensors only: the format has no place for anything else.
void write_safetensors(const std::string& folder, const std::string& path,
                       const std::string& prefix) {
  const dcp::Reader reader(folder);
  std::vector<safetensors::Entry> entries;
  std::vector<std::string> keys;
  for (const dcp::StoredEntry& entry : reader.metadata().entries) {
    if (!entry.is_tensor || !entry.key.starts_with(prefix)) continue;
    entries.push_back({entry.key.substr(prefix.size()), entry.dtype, entry.sizes});
    keys.push_back(entry.key);
  }
  TORCH_CHECK_VALUE(!keys.empty(), folder, " has no tensors whose keys start with '", prefix, "'");
  safetensors::Writer writer(path, entries, {{"format", "pt"}});
  for (const std::string& key : keys) writer.write(reader.load_one(key).to_tensor());
  writer.commit();
}

dcp::StateDict read_any(const std::string& from, const std::string& prefix) {
  dcp::StateDict state;
  if (is_folder(from) && prefix.empty()) return dcp::load_everything(from);
  if (is_folder(from)) {
    const dcp::Reader reader(from);
    for (const std::string& key : reader.keys()) {
      if (key.starts_with(prefix)) state[key] = reader.load_one(key);
    }
    return state;
  }
  if (is_safetensors(from)) {
    const safetensors::Reader reader(from);
    for (const auto& entry : reader.entries()) {
      if (entry.name.starts_with(prefix)) state[entry.name] = reader.read(entry.name);
    }
    return state;
  }
  const dcp::Value value = dcp::read_torch_file(from);
  TORCH_CHECK_VALUE(value.is_dict(), from, " holds ", value.kind(), ", not a dict");
  for (const auto& [name, item] : value.dict()) {
    if (name.starts_with(prefix)) state[name] = item;
  }
  return state;
}

}  // namespace

void convert_checkpoint(const std::string& from, const std::string& to, const std::string& prefix) {
  TORCH_CHECK_VALUE(is_folder(from) || is_safetensors(from) || is_torch_file(from), from,
                    " is neither a checkpoint's folder nor a .safetensors or .pt file");
  TORCH_CHECK_VALUE(!is_in_bucket(to) || !(is_safetensors(to) || is_torch_file(to)), to,
                    " cannot be written: only checkpoints can be in a bucket");
  if (is_safetensors(to) && is_folder(from)) return write_safetensors(from, to, prefix);
  const dcp::StateDict state = read_any(from, prefix);
  TORCH_CHECK_VALUE(!state.empty(), from, " has no keys that start with '", prefix, "'");
  if (is_torch_file(to)) {
    dcp::write_torch_file(state, to);
  } else {
    TORCH_CHECK_VALUE(!is_safetensors(to), "from ", from,
                      " only a checkpoint's folder or a .pt file can be made");
    dcp::save(state, to);
  }
}

}  // namespace fsdp2::cli
