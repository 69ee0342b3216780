#pragma once

// What one call of fully_shard is going to do, worked out and checked before anything changes.

#include "fsdp/wrapped_modules.h"

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace fsdp2::fsdp {

/// One registry entry: where it is, and under which name a user sees it.
struct Entry {
  torch::Tensor* registered;
  std::string name;
};

/// ParameterList and ParameterDict have no members: forward reads their registry. The module keeps
/// the original, with the whole parameters; a twin that holds the shards takes its place in the
/// registry of the parent.
struct Twin {
  torch::nn::Module* parent;
  std::string name;
  ModulePtr module;
};

/// A parameter to shard.
struct PlannedParam {
  ParamSpec spec;
  DeviceMesh mesh{};
  std::vector<Entry> entries{};  // where it is registered
};

/// What one call is going to do, worked out before anything changes.
struct Plan {
  DeviceMesh mesh;
  GroupPolicy policy;
  std::optional<bool> reshard_after_forward;
  int64_t reshard_to = 0;                // ranks to reshard to after forward; 0: all
  std::vector<PlannedParam> parameters;  // each once
  std::vector<Entry> shared;             // entries that hold a member of another group
  std::vector<torch::Tensor> buffers;
  std::vector<State> inner;  // wrapped modules below
  std::vector<std::string> inner_paths;
  std::vector<Twin> twins;
};

/// Error if the modules cannot be wrapped so.
Plan make_plan(const std::vector<ModulePtr>& modules, const FullyShardOptions& options);

/// Errors name a parameter by its path from the outermost wrapped module.
void rename_inner(const Plan& plan);

/// A parameter that is registered after wrapping would be trained by each rank alone: to be run
/// after backward.
std::function<void()> census(const std::vector<ModulePtr>& modules,
                             const std::vector<torch::Tensor>& ignored);

}  // namespace fsdp2::fsdp
