#pragma once

// Making groups, for the rest of the library: only the members need call these.

#include <fsdp2/process_group.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::comm {

/// The name of the backend for each type of device.
using Backends = std::map<c10::DeviceType, std::string>;

/// The name of the backend that each group chooses: "shm" where its ranks share a host, "hosts"
/// where they are on several and some share one, else "gloo".
inline constexpr const char* kBest = "";

/// Reads "shm", "gloo", "nccl", "cpu:shm,cuda:nccl" or "fake"; empty gives kBest (gloo where
/// memory may not be shared) and what this build and this machine have. Error if the text cannot be
/// read, or a backend is not built or has no device here.
Backends parse_backends(const std::string& text);

/// One rank of a world that is not there.
bool is_fake(const Backends& backends);

struct GroupOptions {
  /// Nobody else may use its keys.
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;  // in the group
  std::vector<int> global_ranks;
  Backends backends;
  /// Of each rank of the group, equal where ranks can share memory; empty if that is not known.
  std::vector<std::string> hosts;
  std::string name;
  std::chrono::milliseconds timeout{};
  std::string master_addr;
};

/// Blocks until all members have called it.
ProcessGroup make_group(const GroupOptions& options);

/// A group in the world of `ranks` (global; this rank among them) that its members alone make.
/// `key` is the same on all members, and no other group's. `name` is for people. Error, on all
/// members, if their `ranks` differ.
ProcessGroup make_group_of_members(const std::vector<int>& ranks, const std::string& key,
                                   const std::string& name,
                                   std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// Another group of the same members, the same one at every call: what is sent in it never queues
/// behind what is sent in `group`. The first call is collective over the group. Of one rank: the
/// group itself. Thread-safe.
ProcessGroup second_group(const ProcessGroup& group);
/// Another group of the same members, for messages in host memory that are sent from a thread of
/// the library's own. Like second_group otherwise.
ProcessGroup host_group(const ProcessGroup& group);
/// The group of this rank and its neighbours, `size` of them, a factor of the group's. Like
/// second_group otherwise.
ProcessGroup neighbour_group(const ProcessGroup& group, int64_t size);
/// Lets go of all groups that these made.
void forget_derived_groups();

/// Whether `group` can move tensors on devices of this type.
bool has_backend(const ProcessGroup& group, c10::DeviceType type);

/// The world's ranks of a group's members. Communicates only for a group that was not made here.
std::vector<int> global_ranks(const ProcessGroup& group);

}  // namespace fsdp2::comm
