#pragma once

// For the library's own use of backend "shm": memory that the ranks of a group share.

#include "comm/shared_memory.h"

#include <fsdp2/process_group.h>

#include <memory>

namespace fsdp2::comm {

/// Who of the group is there, if its ranks share memory (its backend for the CPU is "shm"); else
/// null.
std::shared_ptr<Presence> presence_of(const ProcessGroup& group);

}  // namespace fsdp2::comm
