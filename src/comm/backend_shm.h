#pragma once

// For the library's own use of backend "shm": memory that the ranks of a group share.

#include "comm/shared_memory.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

namespace fsdp2::comm {

/// Who of the group is there, if `backend` is "shm"; else null.
std::shared_ptr<Presence> shm_presence(const c10d::Backend& backend);

/// Breaks the group of a backend "shm". Returns why: what the first rank to do so has said.
std::string break_up_shm(c10d::Backend& backend, const std::string& why);

}  // namespace fsdp2::comm
