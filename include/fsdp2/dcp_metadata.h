#pragma once

// What a checkpoint's `.metadata` says: which tensors and values there are, and where their bytes
// lie. Reading it runs nothing from it.

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

namespace fsdp2::dcp {

/// `length` bytes at `offset` of `file`, a name within the checkpoint's folder.
struct Place {
  std::string file;
  uint64_t offset = 0, length = 0;
};

/// A block of a tensor. Of a 0-dim tensor: no offsets, no sizes.
struct StoredChunk {
  std::vector<int64_t> offsets, sizes;
  Place place;
};

/// A name in a dict or an index of a list.
using PathPart = std::variant<std::string, int64_t>;

struct StoredEntry {
  std::string key;             // flattened: "optim.param_groups.0.lr"
  std::vector<PathPart> path;  // {"optim", "param_groups", 0, "lr"}; empty if it was not kept
  bool is_tensor = false;      // else an object, with one chunk without sizes
  torch::ScalarType dtype = torch::kFloat32;
  std::vector<int64_t> sizes;
  std::vector<StoredChunk> chunks;

  int64_t numel() const;
  /// Of its bytes on the disk.
  uint64_t stored_bytes() const;
};

struct Metadata {
  std::vector<StoredEntry> entries;
  std::string save_id;  // of this one save; may be empty
  std::string version;  // of the format; may be empty

  /// Null if there is none.
  const StoredEntry* find(const std::string& key) const;
  /// Adds one; error if there is one of this key.
  StoredEntry& add(StoredEntry entry);

 private:
  std::unordered_map<std::string, size_t> index_;
};

/// Of the checkpoint in `folder`. Errors name the file: there is none (the checkpoint is
/// incomplete), it is damaged, it describes what cannot be (blocks that overlap or leave gaps), or
/// it names files outside of the folder.
Metadata read_metadata(const std::string& folder);

}  // namespace fsdp2::dcp
