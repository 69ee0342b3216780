#include "comm/shm/registry.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace fsdp2::comm::shm_registry {
namespace {

struct Groups {
  std::mutex mutex;
  std::vector<std::weak_ptr<ShmEngine>> all;
  std::atomic<int> busy = 0;
};
Groups& groups() {
  static auto* groups = new Groups();  // outlives groups that are never left
  return *groups;
}

}  // namespace

void add(const std::shared_ptr<ShmEngine>& engine) {
  const std::lock_guard lock(groups().mutex);
  std::erase_if(groups().all, [](const auto& group) { return group.expired(); });
  groups().all.push_back(engine);
}

void count_busy(int change) { groups().busy.fetch_add(change); }

int busy() { return groups().busy.load(std::memory_order_relaxed); }

std::vector<std::shared_ptr<ShmEngine>> others(const ShmEngine& than) {
  std::vector<std::shared_ptr<ShmEngine>> found;
  const std::lock_guard lock(groups().mutex);
  for (const auto& group : groups().all) {
    if (auto engine = group.lock(); engine && engine.get() != &than)
      found.push_back(std::move(engine));
  }
  return found;
}

}  // namespace fsdp2::comm::shm_registry
