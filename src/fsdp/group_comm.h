#pragma once

// How the bytes of one parameter group travel: shards in, whole parameters out; whole gradients in,
// sharded gradients out. One implementation copies through a process group; the schedule above does
// not know which.
//
// Both directions carry a few words besides the data, so that ranks which disagree find out from
// the collective they were doing anyway.

#include <fsdp2/device_mesh.h>

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::fsdp {

/// Shape of one gathered parameter and of its shards under the chunk rule on dim 0.
struct ParamLayout {
  std::string name;
  std::vector<int64_t> sizes;
  /// Of the whole parameter in memory: dense, not always contiguous.
  std::vector<int64_t> strides;
  torch::ScalarType dtype = torch::kFloat;
  int64_t numel = 0;
  /// Too small to split (0-dim): every rank holds it whole.
  bool replicated = false;

  int64_t nbytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
  std::vector<int64_t> local_sizes(int64_t ranks, int64_t rank) const;
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

class GroupComm {
 public:
  virtual ~GroupComm() = default;
  /// `shards`: local parts, one a parameter, cast to the layout's dtype on the way. Collective;
  /// they may be written once finish() has returned.
  virtual std::unique_ptr<Gather> start_gather(const std::vector<torch::Tensor>& shards,
                                               const GatherWords& words) = 0;
  /// `gradients`: whole, one a parameter, undefined where there is none; they travel as `dtype`.
  /// `fingerprint` (24 bits used) says what is being reduced. Collective.
  virtual std::unique_ptr<Reduce> start_reduce(const std::vector<size_t>& params,
                                               const std::vector<torch::Tensor>& gradients,
                                               torch::ScalarType dtype, uint32_t fingerprint) = 0;
};

/// Copies through the mesh's process groups: shards over its last dimension; sums go over its first
/// too if it has two. With one rank nothing is sent.
std::unique_ptr<GroupComm> make_copying_comm(const DeviceMesh& mesh,
                                             std::vector<ParamLayout> layouts);

}  // namespace fsdp2::fsdp
