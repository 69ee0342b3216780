#pragma once

// Groups of ranks that are taken to be on several hosts.

#include "comm/groups.h"
#include "comm/world.h"
#include "support/shm_ranks.h"

#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <numeric>
#include <string>
#include <vector>

namespace fsdp2::testing {

/// The host of each rank: "a" or "a/1".
using Hosts = std::vector<std::string>;

/// Several ranks on some host; in order, and mixed.
inline std::vector<Hosts> host_shapes() {
  return {{"a", "a", "b", "b"},      {"a", "a", "a", "b"},      {"a", "a", "b", "c", "c"},
          {"a", "b", "a", "b"},      {"a", "b", "b", "a", "b"}, {"a", "b", "a"},
          {"a", "b", "c", "b", "b"}, {"a", "b", "b", "b", "b"}};
}

/// A group of the world's ranks as if they were on `hosts`. `key` is no other group's.
inline ProcessGroup group_on(const Hosts& hosts, const std::string& backend, const std::string& key,
                             std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  comm::GroupOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(key, world_group()->getStore());
  options.rank = get_rank();
  options.global_ranks.resize(hosts.size());
  std::iota(options.global_ranks.begin(), options.global_ranks.end(), 0);
  options.backends = {{c10::kCPU, backend}};
  options.hosts = hosts;
  options.name = key;
  options.timeout = timeout;
  return comm::make_group(options);
}

inline std::string backend_name(const ProcessGroup& group) {
  return group->getBackend(c10::kCPU)->getBackendName();
}

/// on_ranks in a world whose ranks are taken to be on `hosts`, and so are those of groups and
/// meshes that are made in it.
inline void on_hosts(const Hosts& hosts, const std::function<void(int rank)>& body,
                     std::chrono::seconds limit = std::chrono::seconds(60)) {
  on_shm_ranks(
      static_cast<int>(hosts.size()),
      [&](int rank) {
        comm::world().hosts = hosts;
        comm::world().group = group_on(hosts, comm::kBest, "on hosts", limit / 2);
        body(rank);
      },
      limit);
}

}  // namespace fsdp2::testing
