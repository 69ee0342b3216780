#include "fsdp/host_group.h"

#include "comm/exits.h"
#include "comm/host_presence.h"
#include "comm/share_memory.h"

#include <fsdp2/process_group.h>

#include <map>
#include <mutex>

namespace fsdp2::fsdp {
namespace {

constexpr uint64_t kPlaces = 1024;  // of gathers that a rank may be ahead of another

}  // namespace

/// In shared memory; numbers of places, from 1.
struct HostGroup::Member {
  comm::Counter said;
  comm::Counter heard;
  SharedWords words[kPlaces];
};

std::shared_ptr<HostGroup> HostGroup::of(const ProcessGroup& group) {
  static std::mutex mutex;
  static auto* known = new std::map<c10d::ProcessGroup*, std::weak_ptr<HostGroup>>();
  const auto presence = comm::presence_of(group);
  if (!presence) return nullptr;
  const std::lock_guard lock(mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  if (auto found = (*known)[group.get()].lock()) return found;
  const size_t bytes = static_cast<size_t>(presence->size()) * sizeof(Member);
  auto made = std::make_shared<HostGroup>(presence, comm::share_memory(group, bytes, "words"));
  (*known)[group.get()] = made;
  return made;
}

HostGroup::HostGroup(std::shared_ptr<comm::Presence> presence,
                     std::shared_ptr<comm::SharedMemory> memory)
    : reductions(presence), presence_(std::move(presence)), memory_(std::move(memory)) {}

HostGroup::Member& HostGroup::member(int rank) const {
  return reinterpret_cast<Member*>(memory_->data())[rank];
}

uint64_t HostGroup::say(const SharedWords& words) {
  if (comm::forked_from_a_rank())
    comm::check_not_forked("a gather on rank " + std::to_string(get_rank()));
  const uint64_t place = ++said_;
  for (int rank = 0; place > kPlaces && rank < presence_->size(); ++rank) {
    if (rank != presence_->rank()) presence_->wait(member(rank).heard, place - kPlaces, rank);
  }
  Member& own = member(presence_->rank());
  own.words[place % kPlaces] = words;
  own.said.set(place);
  open_.insert(place);
  return place;
}

std::vector<SharedWords> HostGroup::hear(uint64_t place) {
  std::vector<SharedWords> all;
  all.reserve(static_cast<size_t>(presence_->size()));
  for (int rank = 0; rank < presence_->size(); ++rank) {
    presence_->wait(member(rank).said, place, rank);
    all.push_back(member(rank).words[place % kPlaces]);
  }
  return all;
}

void HostGroup::forget(uint64_t place) {
  if (open_.erase(place) == 0) return;
  member(presence_->rank()).heard.set(open_.empty() ? said_ : *open_.begin() - 1);
}

}  // namespace fsdp2::fsdp
