#pragma once

// Who writes what. Every rank makes the same plan from what all ranks say of their state.

#include "checkpoint/blocks.h"
#include "checkpoint/exchange.h"
#include "checkpoint/flatten.h"

#include <fsdp2/dcp_metadata.h>
#include <fsdp2/dcp_value.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// What is written at once, and as one item, at most.
constexpr int64_t kPieceBytes = int64_t{64} * 1024 * 1024;

/// A leaf of this rank's state.
struct SaveLeaf {
  std::string key;
  std::vector<PathPart> path;
  torch::Tensor data;   // this rank's part of a tensor, or
  std::string archive;  // an object as it is written
  torch::ScalarType dtype = torch::kFloat32;
  std::vector<int64_t> sizes;
  Block block;
  bool sharded = false;  // else the same on all ranks, as far as one can tell

  bool is_tensor() const { return data.defined(); }
  uint64_t bytes() const;
};

/// Error naming the key if something cannot be saved. `state` is not kept.
std::vector<SaveLeaf> save_leaves(const StateDict& state, const Exchange& exchange);

struct SavePlan {
  std::vector<StoredEntry> entries;      // of all ranks; places are empty
  std::vector<std::vector<int>> owners;  // of each entry's blocks, in the group
  std::vector<std::string> disagreeing;  // keys whose values differ between ranks
};

/// Collective.
std::shared_ptr<const SavePlan> plan_save(const std::vector<SaveLeaf>& leaves,
                                          const Exchange& exchange);

}  // namespace fsdp2::dcp
