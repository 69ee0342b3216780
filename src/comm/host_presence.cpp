#include "comm/host_presence.h"

#include "comm/backend_shm.h"
#include "comm/counting.h"
#include "comm/groups.h"
#include "comm/rendezvous.h"
#include "comm/share_memory.h"

#include <fsdp2/collectives.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace fsdp2::comm {
namespace {

struct Presences {
  std::mutex mutex;
  std::map<ProcessGroup, std::shared_ptr<Presence>> known;
};
Presences& presences() {
  static auto* made = new Presences();
  return *made;
}

std::shared_ptr<Presence> make_presence(const ProcessGroup& group) {
  const Uncounted uncounted;
  const std::vector<std::string> places = all_gather_bytes(host_identity(), group);
  const bool one_host = std::all_of(places.begin(), places.end(),
                                    [&](const std::string& other) { return other == places[0]; });
  if (!one_host) return nullptr;
  try {
    auto memory = share_memory(group, Presence::bytes(group->getSize()), "presence");
    return std::make_shared<Presence>(std::move(memory), group->getRank(), global_ranks(group),
                                      group->getGroupName(),
                                      group->getBackend(c10::kCPU)->getBackendOptions()->timeout);
  } catch (const c10::Error& error) {
    // The same on all ranks: what the system refuses is told to all.
    TORCH_WARN_ONCE("parameters are copied between the ranks of this host, not shared: ",
                    plain_message(error));
    return nullptr;
  }
}

}  // namespace

std::shared_ptr<Presence> presence_of(const ProcessGroup& group) {
  if (group->getSize() == 1 || !has_backend(group, c10::kCPU)) return nullptr;
  const auto backend = group->getBackend(c10::kCPU);
  if (backend->getBackendName() == "shm")
    return may_share_memory() ? shm_presence(*backend) : nullptr;
  if (backend->getBackendName() != "gloo") return nullptr;
  Presences& all = presences();
  const std::lock_guard lock(all.mutex);
  const auto found = all.known.find(group);
  if (found != all.known.end()) return found->second;
  return all.known[group] = make_presence(group);
}

void forget_presences() {
  Presences& all = presences();
  const std::lock_guard lock(all.mutex);
  all.known.clear();
}

}  // namespace fsdp2::comm
