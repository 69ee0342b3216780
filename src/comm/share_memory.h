#pragma once

#include "comm/shared_memory.h"

#include <fsdp2/process_group.h>

namespace fsdp2::comm {

/// Memory, all zeros, that the ranks of a group on one host have in common. Collective; `bytes` is
/// the largest that a rank asks for. Error on all ranks if one cannot have it, naming that.
std::shared_ptr<SharedMemory> share_memory(const ProcessGroup& group, size_t bytes,
                                           const std::string& name);

}  // namespace fsdp2::comm
