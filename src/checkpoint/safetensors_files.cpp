#include "checkpoint/blocks.h"
#include "checkpoint/conversion.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/exchange.h"
#include "checkpoint/file_io.h"
#include "checkpoint/load_report.h"
#include "checkpoint/near_names.h"
#include "checkpoint/state_dict_tools.h"

#include <fsdp2/dtensor.h>
#include <fsdp2/safetensors_files.h>

#include <c10/util/Exception.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

namespace fsdp2::safetensors {
namespace {

namespace fs = std::filesystem;
using dcp::Exchange;

constexpr const char *kOneFile = "model.safetensors", *kIndex = "model.safetensors.index.json";

std::string mapped(const NameMap& map, const std::string& name) { return map ? map(name) : name; }

// --- saving
// ---------------------------------------------------------------------------------------

struct PlannedFile {
  std::string path;
  std::vector<Entry> entries;
  std::vector<torch::Tensor> tensors;
  uint64_t bytes = 0;
};

/// The tensors in order, in files of at most `most_bytes`; without paths yet.
std::vector<PlannedFile> plan_files(const dcp::StateDict& state, uint64_t most_bytes,
                                    const NameMap& map) {
  std::vector<PlannedFile> planned(1);
  std::unordered_set<const void*> seen;
  for (const auto& [name, value] : state) {
    TORCH_CHECK_VALUE(value.is_tensor() && value.to_tensor().defined(), name,
                      ": safetensors hold tensors only, got ", value.kind());
    const torch::Tensor& tensor = value.to_tensor();
    const torch::Tensor data = dcp::data_of(tensor);
    dcp::block_of(tensor);  // refuses partial sums
    if (data.numel() > 0 && data.has_storage() &&
        !seen.insert(data.storage().unsafeGetStorageImpl()).second) {
      continue;  // another name of a tensor that is written
    }
    const uint64_t bytes =
        static_cast<uint64_t>(tensor.numel()) * c10::elementSize(tensor.scalar_type());
    if (planned.back().bytes > 0 && planned.back().bytes + bytes > most_bytes) {
      planned.emplace_back();
    }
    planned.back().entries.push_back(
        {mapped(map, name), tensor.scalar_type(), tensor.sizes().vec()});
    planned.back().tensors.push_back(tensor);
    planned.back().bytes += bytes;
  }
  return planned;
}

std::string file_name(size_t index, size_t count) {
  if (count == 1) return kOneFile;
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

/// All ranks gather every tensor; the file's owner writes. Its failure is raised on all once all
/// have gathered.
void write_one(const PlannedFile& file, int owner, const Metadata& metadata,
               const Exchange& exchange) {
  exchange.agree([&] {
    std::unique_ptr<Writer> writer;
    std::exception_ptr failure;
    const auto by_owner = [&](const auto& write) {
      if (exchange.rank() != owner || failure) return;
      try {
        write();
      } catch (...) {
        failure = std::current_exception();
      }
    };
    by_owner([&] { writer = std::make_unique<Writer>(file.path, file.entries, metadata); });
    for (const torch::Tensor& tensor : file.tensors) {
      const torch::Tensor whole = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
      by_owner([&] { writer->write(whole); });
    }
    by_owner([&] { writer->commit(); });
    if (failure) std::rethrow_exception(failure);
  });
}

void write_index(const std::vector<PlannedFile>& planned, const std::string& folder) {
  uint64_t total = 0;
  nlohmann::json map = nlohmann::json::object();
  for (const PlannedFile& file : planned) {
    total += file.bytes;
    for (const Entry& entry : file.entries) {
      map[entry.name] = fs::path(file.path).filename().string();
    }
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  files::replace((fs::path(folder) / kIndex).string(), index.dump(2) + "\n");
}

// --- loading
// --------------------------------------------------------------------------------------

/// Every tensor of a file or folder, by name.
class Files {
 public:
  explicit Files(const std::string& path) : path_(path) {
    if (!fs::is_directory(path)) {
      add(path);
      return;
    }
    if (!fs::exists(fs::path(path) / kIndex)) {
      TORCH_CHECK(fs::exists(fs::path(path) / kOneFile), path, " has neither ", kOneFile, " nor ",
                  kIndex);
      add((fs::path(path) / kOneFile).string());
      return;
    }
    for (const std::string& file : indexed_files()) add((fs::path(path) / file).string());
    for (const auto& [name, file] : indexed_) {
      TORCH_CHECK(readers_.count(name) > 0, (fs::path(path_) / file).string(), " lacks ", name,
                  ", which ", kIndex, " says it has");
    }
  }

  const Reader* find(const std::string& name) const {
    const auto place = readers_.find(name);
    return place == readers_.end() ? nullptr : place->second.get();
  }
  std::vector<std::string> names;
  std::unordered_map<std::string, Entry> entries;

 private:
  void add(const std::string& file) {
    TORCH_CHECK(fs::exists(file), file, " is missing");
    const auto reader = std::make_shared<const Reader>(file);
    for (const Entry& entry : reader->entries()) {
      TORCH_CHECK(readers_.emplace(entry.name, reader).second, file, ": ", entry.name,
                  " is in another file of the folder too");
      names.push_back(entry.name);
      entries[entry.name] = entry;
    }
  }
  std::vector<std::string> indexed_files() {
    const std::string index = (fs::path(path_) / kIndex).string();
    std::vector<std::string> files;
    try {
      const auto json = nlohmann::json::parse(files::read_all(index));
      for (const auto& [name, file] : json.at("weight_map").items()) {
        const auto text = file.get<std::string>();
        TORCH_CHECK(!text.empty() && fs::path(text).filename() == text, index,
                    " names a file outside of the folder, ", text);
        if (std::count(files.begin(), files.end(), text) == 0) files.push_back(text);
        indexed_[name] = text;
      }
    } catch (const nlohmann::json::exception& error) {
      TORCH_CHECK(false, index, " is damaged: ", error.what());
    }
    return files;
  }

  const std::string path_;
  std::unordered_map<std::string, std::shared_ptr<const Reader>> readers_;
  std::map<std::string, std::string> indexed_;
};

struct Copy {
  const Reader* reader;
  std::string name;
  torch::Tensor tensor;
};

std::vector<Copy> plan_copies(const dcp::StateDict& state, const Files& files,
                              const LoadFilesOptions& options, dcp::LoadReport& report) {
  std::vector<Copy> copies;
  std::unordered_set<std::string> used;
  std::unordered_set<const void*> filled;
  std::vector<std::pair<std::string, const void*>> missing;
  for (const auto& [key, value] : state) {
    TORCH_CHECK_VALUE(value.is_tensor() && value.to_tensor().defined(), key,
                      ": only tensors can be loaded from safetensors, the state has ",
                      value.kind());
    const torch::Tensor& tensor = value.to_tensor();
    const torch::Tensor data = dcp::data_of(tensor);
    const std::string name = mapped(options.name, key);
    const void* identity = data.has_storage() ? data.storage().unsafeGetStorageImpl() : nullptr;
    const Reader* reader = files.find(name);
    if (reader == nullptr) {
      missing.emplace_back(name, identity);
      continue;
    }
    const Entry& entry = files.entries.at(name);
    TORCH_CHECK_VALUE(tensor.sizes() == entry.sizes, key, ": its size is ", tensor.sizes(),
                      " in the state, ", c10::IntArrayRef(entry.sizes), " in the file");
    TORCH_CHECK_VALUE(!data.is_meta(), key,
                      " is on the meta device, without memory: to_empty() the module first");
    try {
      dcp::check_conversion(name, entry.dtype, tensor.scalar_type(), options.allow_narrowing,
                            report);
    } catch (const c10::ValueError& error) {
      TORCH_CHECK_VALUE(false, key, ": ", error.what_without_backtrace());
    }
    copies.push_back({reader, name, tensor});
    used.insert(name);
    filled.insert(identity);
  }
  for (const auto& [name, identity] : missing) {
    if (identity == nullptr || filled.count(identity) == 0) report.missing.push_back(name);
  }
  for (const std::string& name : files.names) {
    if (used.count(name) == 0) report.unexpected.push_back(name);
  }
  dcp::check_missing(report.missing, files.names, !copies.empty(), options.allow_partial);
  return copies;
}

}  // namespace

void save_files(const dcp::StateDict& state, const std::string& folder,
                const SaveFilesOptions& options) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(nullptr, "saving " + folder);
  std::vector<PlannedFile> planned;
  exchange.agree([&] {
    planned = plan_files(state, options.most_bytes, options.name);
    fs::create_directories(folder);
  });
  for (size_t i = 0; i < planned.size(); ++i) {
    planned[i].path = (fs::path(folder) / file_name(i, planned.size())).string();
    write_one(planned[i], static_cast<int>(i) % exchange.size(), options.metadata, exchange);
  }
  exchange.agree([&] {
    if (exchange.rank() != 0) return;
    // What an older one had of the other form goes: readers differ in which of the two they prefer.
    if (planned.size() > 1) write_index(planned, folder);
    fs::remove(fs::path(folder) / (planned.size() > 1 ? kOneFile : kIndex));
  });
}

void save_file(const dcp::StateDict& state, const std::string& path, const Metadata& metadata,
               const NameMap& name) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(nullptr, "saving " + path);
  std::vector<PlannedFile> planned;
  exchange.agree([&] {
    planned = plan_files(state, std::numeric_limits<uint64_t>::max(), name);
    planned[0].path = path;
  });
  write_one(planned[0], 0, metadata, exchange);
}

dcp::LoadReport load_files(dcp::StateDict& state, const std::string& path,
                           const LoadFilesOptions& options) {
  torch::NoGradGuard no_grad;
  const Exchange exchange(nullptr, "loading " + path);
  std::unique_ptr<Files> files;
  std::vector<Copy> copies;
  const dcp::LoadReport report = dcp::agreed_report(exchange, [&] {
    files = std::make_unique<Files>(path);
    dcp::LoadReport of_rank;
    copies = plan_copies(state, *files, options, of_rank);
    return of_rank;
  });
  for (const Copy& copy : copies) {
    const dcp::Block part = dcp::block_of(copy.tensor);
    const dcp::Block all{std::vector<int64_t>(part.sizes.size(), 0), copy.tensor.sizes().vec()};
    dcp::announce_write(copy.tensor);
    dcp::data_of(copy.tensor).copy_(dcp::view_of(copy.reader->read(copy.name), all, part));
  }
  return report;
}

}  // namespace fsdp2::safetensors
