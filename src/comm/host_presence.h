#pragma once

#include "comm/shared_memory.h"

#include <fsdp2/process_group.h>

namespace fsdp2::comm {

/// The members of a group as those who share memory. Null where they cannot: a group of one, over
/// several hosts, without backend "shm" or "gloo" for the CPU, or where they may not; and, with a
/// warning, where the system refuses. Collective at the first call for a
/// group.
std::shared_ptr<Presence> presence_of(const ProcessGroup& group);
/// Lets go of what presence_of() keeps.
void forget_presences();

}  // namespace fsdp2::comm
