#pragma once

// What the parameter groups of one process group have in common where its ranks share a host: who
// is there, the words that they say in gathers, and the memory of their reductions.

#include "comm/shared_memory.h"
#include "comm/shared_reductions.h"
#include "fsdp/group_comm.h"

#include <fsdp2/process_group.h>

#include <memory>
#include <set>
#include <vector>

namespace fsdp2::fsdp {

/// What a rank says in a gather through shared memory.
struct SharedWords {
  GatherWords words;
  uint64_t number = 0;  // of the group's gather
};

/// Not thread-safe by itself: the schedule's lock guards it.
class HostGroup {
 public:
  /// Null where the ranks cannot share memory. Collective at the first call for a process group.
  static std::shared_ptr<HostGroup> of(const ProcessGroup& group);
  HostGroup(std::shared_ptr<comm::Presence> presence, std::shared_ptr<comm::SharedMemory> memory);

  const std::shared_ptr<comm::Presence>& presence() const { return presence_; }

  /// Says `words` to all. Gathers are started in the same order on all ranks; returns its place.
  uint64_t say(const SharedWords& words);
  /// What all have said there. Blocks.
  std::vector<SharedWords> hear(uint64_t place);
  /// This rank has heard, or will not.
  void forget(uint64_t place);

  comm::SharedReductions reductions;

 private:
  struct Member;
  Member& member(int rank) const;

  const std::shared_ptr<comm::Presence> presence_;
  const std::shared_ptr<comm::SharedMemory> memory_;
  uint64_t said_ = 0;
  std::set<uint64_t> open_;  // said, and not forgotten
};

}  // namespace fsdp2::fsdp
