#pragma once

// Nested state dicts as flat lists of leaves, under the keys that torch.distributed.checkpoint
// gives them: the path joined by dots.

#include <fsdp2/dcp_metadata.h>
#include <fsdp2/dcp_value.h>

#include <string>
#include <vector>

namespace fsdp2::dcp {

struct Leaf {
  std::string key;
  std::vector<PathPart> path;
  Value* value = nullptr;  // in the dict that was flattened
};

/// Dicts are descended into, and lists that hold a dict or a tensor; everything else is a leaf.
/// With `whole_lists` only lists that hold a tensor somewhere are. Error if two leaves have one
/// key.
std::vector<Leaf> flatten(StateDict& state, bool whole_lists = false);

/// Puts `value` where `path` says, making dicts and lists on the way. Error naming the path if
/// something else is there.
void set_at(Value& root, const std::vector<PathPart>& path, Value value);

bool starts_with(const std::vector<PathPart>& path, const std::vector<PathPart>& prefix);
/// Whether `key` is `prefix` or lies below it.
bool is_below(const std::string& key, const std::string& prefix);

}  // namespace fsdp2::dcp
