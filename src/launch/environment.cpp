#include "launch/environment.h"

#include <algorithm>
#include <sched.h>
#include <stdlib.h>
#include <string_view>
#include <unistd.h>

namespace fsdp2::launch {
namespace {

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

}  // namespace

Variables worker_variables(const LaunchOptions& options, int local_rank,
                           const std::string& run_id) {
  const std::string rank = std::to_string(options.node_rank * options.processes + local_rank);
  const std::string world_size = std::to_string(options.nodes * options.processes);
  Variables variables{
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world_size},
      {"LOCAL_WORLD_SIZE", std::to_string(options.processes)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.nodes)},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world_size},
      {"MASTER_ADDR", options.master_addr},
      {"MASTER_PORT", std::to_string(options.master_port.value())},
      {"TORCHELASTIC_RUN_ID", run_id},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      // Rank 0 serves the store itself.
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
  };
  if (getenv("OMP_NUM_THREADS") == nullptr) {
    const int threads = std::max(1, usable_cores() / options.processes);
    variables.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  }
  return variables;
}

std::vector<std::string> merged_environment(const Variables& variables) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name =
        std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
    const auto replaced = [&](const auto& variable) { return variable.first == name; };
    if (std::none_of(variables.begin(), variables.end(), replaced)) merged.emplace_back(*entry);
  }
  for (const auto& [name, value] : variables) merged.push_back(name + "=" + value);
  return merged;
}

}  // namespace fsdp2::launch
