#pragma once

// The groups of backend "shm" that this process has: whoever waits in one helps the others on.

#include <memory>
#include <vector>

namespace fsdp2::comm {

class ShmEngine;

namespace shm_registry {

void add(const std::shared_ptr<ShmEngine>& engine);
/// By how many more groups have unfinished works.
void count_busy(int change);
int busy();
/// Those that are there, `than` left out.
std::vector<std::shared_ptr<ShmEngine>> others(const ShmEngine& than);

}  // namespace shm_registry
}  // namespace fsdp2::comm
