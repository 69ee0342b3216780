#pragma once

// What a rank finds in its environment: torchrun's contract.

#include "launch/launch.h"

#include <string>
#include <utility>
#include <vector>

namespace fsdp2::launch {

using Variables = std::vector<std::pair<std::string, std::string>>;

/// RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and the rest, for one rank of this host.
/// OMP_NUM_THREADS is there only if the launcher's own environment does not set it.
/// `options.master_port` must have been decided.
Variables worker_variables(const LaunchOptions& options, int local_rank, const std::string& run_id);

/// The launcher's environment with `variables` in place of what it had under their names, as execve
/// takes it.
std::vector<std::string> merged_environment(const Variables& variables);

}  // namespace fsdp2::launch
