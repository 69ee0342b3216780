#include "checkpoint/load_plan.h"

#include "checkpoint/digest.h"
#include "checkpoint/load_report.h"

#include <fsdp2/dtensor.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

namespace fsdp2::dcp {

const files::Readable& OpenFiles::at(const std::string& name) {
  auto& file = files_[name];
  if (!file) {
    const std::string path = files::join(folder_, name);
    file = files::storage_of(path).open(path);
    TORCH_CHECK(file, "the checkpoint is damaged: ", path, " is missing");
  }
  return *file;
}

OpenCheckpoint::OpenCheckpoint(const std::string& where)
    : folder(files::storage_of(where).follow(where)),
      metadata(read_metadata(folder)),
      files(folder) {}

std::vector<std::string> OpenCheckpoint::keys() const {
  std::vector<std::string> keys;
  keys.reserve(metadata.entries.size());
  for (const StoredEntry& entry : metadata.entries) keys.push_back(entry.key);
  return keys;
}

void check_item(const files::Readable& file, const Place& place, const Checksums& checksums) {
  const auto known = checksums.items.find({place.file, place.offset});
  TORCH_CHECK(known != checksums.items.end(), file.path(), ": there is no checksum of the item at ",
              place.offset);
  constexpr uint64_t at_once = uint64_t{8} * 1024 * 1024;
  std::string buffer(std::min(place.length, at_once), '\0');
  files::Digest digest;
  for (uint64_t done = 0; done < place.length;) {
    const uint64_t count = std::min(at_once, place.length - done);
    file.read(place.offset + done, buffer.data(), count);
    digest.add(buffer.data(), count);
    done += count;
  }
  TORCH_CHECK(digest.value() == known->second, file.path(), " is damaged: the item at byte ",
              place.offset, " has other bytes than were saved");
}

namespace {

class LoadPlanner {
 public:
  LoadPlanner(OpenCheckpoint& checkpoint, const LoadOptions& options)
      : checkpoint_(checkpoint), entries_(checkpoint.metadata.entries), options_(options) {
    if (options.verify) {
      checksums_ = read_checksums(checkpoint.folder, checkpoint.metadata);
      TORCH_CHECK(checksums_, checkpoint.folder,
                  " has no checksums to verify: it was not saved by this library");
    }
  }

  LoadPlan run(StateDict& state) {
    // Lists come back whole by their paths, if the checkpoint kept paths.
    const bool has_paths = std::any_of(entries_.begin(), entries_.end(),
                                       [](const auto& entry) { return !entry.path.empty(); });
    for (const Leaf& leaf : flatten(state, has_paths)) {
      if (!selected(leaf.key)) continue;
      try {
        add(leaf);
      } catch (const c10::ValueError& error) {
        TORCH_CHECK_VALUE(false, leaf.key, ": ", error.what_without_backtrace());
      }
    }
    for (const StoredEntry& entry : entries_) {
      if (selected(entry.key) && used_.count(&entry) == 0) {
        plan_.report.unexpected.push_back(entry.key);
      }
    }
    return std::move(plan_);
  }
  /// Only this; its value is the plan's one value.
  LoadPlan run(const StoredEntry& entry, Value& to) {
    assign(to, stored(entry));
    return std::move(plan_);
  }

 private:
  bool selected(const std::string& key) const {
    return options_.only.empty() ||
           std::any_of(options_.only.begin(), options_.only.end(),
                       [&](const auto& prefix) { return is_below(key, prefix); });
  }

  const StoredEntry* use(const StoredEntry* entry) {
    if (entry != nullptr) {
      used_.insert(entry);
      ++plan_.found;
    }
    return entry;
  }

  void add(const Leaf& leaf) {
    const StoredEntry* entry = use(checkpoint_.metadata.find(leaf.key));
    if (leaf.value->is_tensor()) {
      if (entry == nullptr) return miss(leaf);
      TORCH_CHECK_VALUE(entry->is_tensor, "the state has a tensor, the checkpoint an object");
      const torch::Tensor& tensor = leaf.value->to_tensor();
      if (tensor.defined()) return fill(*entry, tensor);
      return assign(*leaf.value, whole(*entry));
    }
    if (entry != nullptr) {
      TORCH_CHECK_VALUE(!entry->is_tensor || leaf.value->is_none(), "the state has ",
                        leaf.value->kind(), ", the checkpoint a tensor");
      return assign(*leaf.value, stored(*entry));
    }
    Value below = everything_below(leaf);
    if (below.is_none()) return miss(leaf);
    assign(*leaf.value, std::move(below));
  }
  void miss(const Leaf& leaf) { plan_.report.missing.push_back(leaf.key); }
  void assign(Value& to, Value value) { plan_.values.push_back({&to, std::move(value)}); }

  /// None if there is nothing.
  Value everything_below(const Leaf& leaf) {
    const bool wants = leaf.value->is_none() || leaf.value->is<List>();
    Value root;
    if (!wants) return root;
    for (const StoredEntry& entry : entries_) {
      if (entry.path.size() <= leaf.path.size() || !starts_with(entry.path, leaf.path)) continue;
      use(&entry);
      set_at(root,
             {entry.path.begin() + static_cast<std::ptrdiff_t>(leaf.path.size()), entry.path.end()},
             stored(entry));
    }
    return root;
  }

  Value stored(const StoredEntry& entry) {
    if (entry.is_tensor) return whole(entry);
    const Place& place = entry.chunks.at(0).place;
    const files::Readable& file = open(place);
    return read_object(file, place.offset, place.length);
  }

  torch::Tensor whole(const StoredEntry& entry) {
    uint64_t stored_bytes = 0;
    for (const StoredChunk& chunk : entry.chunks) {
      if (chunk.place.file.empty()) continue;
      stored_bytes += std::min(chunk.place.length, checkpoint_.files.at(chunk.place.file).size());
    }
    TORCH_CHECK(static_cast<uint64_t>(entry.numel()) <= stored_bytes,
                "the checkpoint is damaged: it says that ", entry.key, " has ", entry.numel(),
                " elements, in ", stored_bytes, " bytes");
    torch::Tensor tensor = torch::empty(entry.sizes, torch::TensorOptions(entry.dtype));
    fill(entry, tensor);
    return tensor;
  }

  void fill(const StoredEntry& entry, const torch::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.sizes() == entry.sizes, "its size is ", tensor.sizes(),
                      " in the state, ", c10::IntArrayRef(entry.sizes), " in the checkpoint");
    TORCH_CHECK_VALUE(tensor.layout() == torch::kStrided && !tensor.is_quantized(),
                      "only dense tensors can be loaded, not ", tensor.layout());
    check_conversion(entry.key, entry.dtype, tensor.scalar_type(), options_.allow_narrowing,
                     plan_.report);
    const Block to = block_of(tensor);
    const torch::Tensor data = data_of(tensor);
    TORCH_CHECK_VALUE(!data.is_meta(),
                      "it is on the meta device, without memory: to_empty() the module first");
    plan_.written.push_back(tensor);
    for (const StoredChunk& chunk : entry.chunks) {
      const Block from{chunk.offsets, chunk.sizes};
      if (intersection(from, to).numel() == 0) continue;
      const files::Readable& file = open(chunk.place);
      StoredTensor stored = read_stored_tensor(file, chunk.place.offset, chunk.place.length);
      TORCH_CHECK(stored.sizes == from.sizes && stored.dtype == entry.dtype, file.path(),
                  " is damaged: the item at byte ", chunk.place.offset, " is ", stored.dtype, " ",
                  c10::IntArrayRef(stored.sizes), ", .metadata says ", entry.dtype, " ",
                  c10::IntArrayRef(from.sizes));
      plan_.tasks.push_back({&file, std::move(stored), from, data, to});
    }
  }

  const files::Readable& open(const Place& place) {
    const files::Readable& file = checkpoint_.files.at(place.file);
    if (checksums_) check_item(file, place, *checksums_);
    return file;
  }

  OpenCheckpoint& checkpoint_;
  const std::vector<StoredEntry>& entries_;
  const LoadOptions& options_;
  std::optional<Checksums> checksums_;
  std::unordered_set<const StoredEntry*> used_;
  LoadPlan plan_;
};

}  // namespace

LoadPlan plan_load(StateDict& state, OpenCheckpoint& checkpoint, const LoadOptions& options) {
  return LoadPlanner(checkpoint, options).run(state);
}

Value read_entry(const StoredEntry& entry, OpenCheckpoint& checkpoint) {
  const LoadOptions options;
  Value value;
  LoadPlan plan = LoadPlanner(checkpoint, options).run(entry, value);
  run(plan.tasks, 1);
  return std::move(plan.values.at(0).value);
}

}  // namespace fsdp2::dcp
