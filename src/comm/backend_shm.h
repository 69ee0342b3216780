#pragma once

// For the library's own use of backend "shm": memory that the ranks of a group share.

#include "comm/shared_memory.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

namespace fsdp2::comm {

/// Who of the group is there, if `backend` is "shm"; else null.
std::shared_ptr<Presence> shm_presence(const c10d::Backend& backend);

}  // namespace fsdp2::comm
