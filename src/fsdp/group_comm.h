#pragma once

// How the bytes of one parameter group travel: shards in, whole parameters out; whole gradients in,
// sharded gradients out. One implementation copies through a process group; the schedule above does
// not know which.
//
// Both directions carry a few words besides the data, so that ranks which disagree find out from
// the collective they were doing anyway.

#include <fsdp2/custom_comm.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/placement.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::fsdp {

/// Shape of one gathered parameter and of its shards under the chunk rule.
struct ParamLayout {
  std::string name;
  std::vector<int64_t> sizes;
  /// Of the whole parameter in memory: dense, not always contiguous.
  std::vector<int64_t> strides;
  torch::ScalarType dtype = torch::kFloat;
  int64_t numel = 0;
  /// The dimension that is split. None: every rank holds the parameter whole.
  std::optional<int64_t> shard_dim = 0;
  /// What travels in the shards' place. May be null.
  std::shared_ptr<AllGatherExtension> extension{};

  int64_t nbytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
  std::vector<int64_t> local_sizes(int64_t ranks, int64_t rank) const;
  /// `whole` (of the layout's sizes), cut down to what `rank` holds.
  torch::Tensor local_part(const torch::Tensor& whole, int64_t ranks, int64_t rank) const;
  /// Of the shards as DTensors on the group's mesh.
  Placements placements(const DeviceMesh& mesh) const;
  /// Elements that every rank's part is padded to.
  int64_t padded_chunk_numel(int64_t ranks) const;
};

/// What every rank says of itself in a gather; all ranks see all of them.
struct GatherWords {
  int64_t group = 0;       // which group
  int64_t sequence = 0;    // how many gathers its context has started
  int64_t generation = 0;  // how often its shards were written
  int64_t mode = 0;        // forward or backward
  bool operator==(const GatherWords&) const = default;
};

/// A gather that was started. Dropping it unfinished waits for nothing and frees what it holds.
class Gather {
 public:
  virtual ~Gather() = default;
  /// Blocks; the bytes of each parameter, whole, laid out by its strides, 64-byte aligned. Call
  /// once. `what` is what errors call it.
  virtual std::vector<c10::DataPtr> finish(const std::string& what) = 0;
  /// Of all ranks, in rank order; valid after finish().
  virtual const std::vector<GatherWords>& words() const = 0;
};

/// One parameter's share in a reduction.
struct ReduceInput {
  size_t param = 0;
  torch::Tensor gradient;  // whole; undefined if there is none
  /// What earlier reductions without all-reduce left: a sum, local sizes. Undefined if nothing.
  torch::Tensor partial{};
};

struct ReduceOptions {
  torch::ScalarType dtype = torch::kFloat;  // in which gradients travel
  uint32_t fingerprint = 0;                 // what is being reduced (24 bits used)
  std::optional<double> divide_factor;      // not given: the number of ranks
  /// False: no sum over replicas and no division; the result goes into a later reduction.
  bool all_reduce = true;
  /// Sees the reduced and divided gradients, flat.
  std::function<void(const torch::Tensor&)> hook;
};

/// A reduction that was started.
class Reduce {
 public:
  virtual ~Reduce() = default;
  struct Result {
    /// Per parameter: this rank's part of the mean over all ranks, its local sizes.
    std::vector<torch::Tensor> gradients;
    /// Per parameter: how many ranks had a gradient.
    std::vector<int64_t> users;
    /// False if ranks reduced different things: the sums mean nothing.
    bool agreed = true;
  };
  /// Blocks. Call once. `what` is what errors call it.
  virtual Result finish(const std::string& what) = 0;
};

/// Gradients on their way into a reduction that has not been started.
class ReduceStage {
 public:
  virtual ~ReduceStage() = default;
  virtual const std::vector<size_t>& params() const = 0;
  // `i` is the position in params().
  /// A whole gradient, copied; added, if there is one already.
  virtual void put(size_t i, const torch::Tensor& gradient) = 0;
  /// A copy of what was put; undefined if nothing was.
  virtual torch::Tensor take(size_t i) = 0;
};

class GroupComm {
 public:
  virtual ~GroupComm() = default;
  /// `shards`: local parts, one a parameter, cast to the layout's dtype on the way. Collective;
  /// they may be written once finish() has returned.
  virtual std::unique_ptr<Gather> start_gather(const std::vector<torch::Tensor>& shards,
                                               const GatherWords& words) = 0;
  /// `stage`: gradients that have gone ahead; a gradient in `inputs` is added to them. Of the same
  /// parameters, in the same order and dtype. May be null.
  virtual std::unique_ptr<Reduce> start_reduce(const std::vector<ReduceInput>& inputs,
                                               const ReduceOptions& options,
                                               std::unique_ptr<ReduceStage> stage) = 0;
  /// A place for gradients of the reduction that is expected to be the next, if one can be had
  /// without waiting; else null. `taken` is called when another reduction needs it; all
  /// gradients have to be taken out then, and the stage dropped.
  virtual std::unique_ptr<ReduceStage> stage_reduce(std::vector<size_t> params,
                                                    torch::ScalarType dtype,
                                                    std::function<void()> taken) = 0;

  // The user's own communication; null: the library's.
  std::shared_ptr<AllGather> custom_all_gather;
  std::shared_ptr<ReduceScatter> custom_reduce_scatter;
};

/// Copies through the mesh's process groups: shards over its last dimension; sums go over its first
/// too if it has two. With one rank nothing is sent. Without `reduces` it can gather only.
std::unique_ptr<GroupComm> make_copying_comm(const DeviceMesh& mesh,
                                             std::vector<ParamLayout> layouts, bool reduces = true);

}  // namespace fsdp2::fsdp
