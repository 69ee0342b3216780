#include "comm/groups.h"

#include "comm/backend.h"
#include "comm/backend_hosts.h"
#include "comm/exits.h"
#include "comm/hosts/places.h"
#include "comm/rendezvous.h"
#include "comm/shared_memory.h"
#include "comm/shm/segment.h"
#include "comm/world.h"

#include <fsdp2/collectives.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/cuda.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>

namespace fsdp2::comm {
namespace {

constexpr const char* kFake = "fake";
constexpr const char* kGloo = "gloo";
constexpr const char* kShm = "shm";
constexpr const char* kHosts = "hosts";

c10::DeviceType device_type(const std::string& name, const std::string& text) {
  if (name == "cpu") return c10::kCPU;
  if (name == "cuda") return c10::kCUDA;
  TORCH_CHECK(false, "init_process_group: backend '", text, "' names the device type '", name,
              "': 'cpu' and 'cuda' are known");
}

void check_backend(c10::DeviceType type, const std::string& name, const std::string& text) {
  TORCH_CHECK(name == kShm || name == kGloo || name == "nccl", "init_process_group: backend '",
              name, "'", name == text ? "" : " in '" + text + "'",
              " is not known: use 'shm', 'gloo', 'nccl' or 'cpu:shm,cuda:nccl', or 'fake' alone");
  TORCH_CHECK(name != kShm || type == c10::kCPU, "init_process_group: backend '", text,
              "' asks for shm on cuda: shm is for cpu");
  TORCH_CHECK(name != "nccl" || type == c10::kCUDA, "init_process_group: backend '", text,
              "' asks for nccl on cpu: nccl is for cuda");
  TORCH_CHECK(name != "nccl" || nccl_is_built(),
              "init_process_group: backend 'nccl' is not built: this libtorch has ",
              "no CUDA, or nccl.h was not found; use 'gloo'");
  TORCH_CHECK(
      type != c10::kCUDA || torch::cuda::is_available(), "init_process_group: backend '", text,
      "' needs a CUDA device, and none is visible (CUDA_VISIBLE_DEVICES, driver); use 'gloo'");
}

c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name,
                                               const BackendOptions& options) {
  try {
    if (name == kFake) return make_fake_backend(options);
    if (name == kShm) return make_shm_backend(options);
    return name == "nccl" ? make_nccl_backend(options) : make_gloo_backend(options);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "rank ", options.rank, " of ", options.global_ranks.size(),
                " could not connect group '", options.group_name, "' over ", name, ": ",
                plain_message(error),
                name == kGloo ? " (GLOO_SOCKET_IFNAME chooses the network interface)"
                : dynamic_cast<const ShmRefused*>(&error) ? "; use 'gloo'"
                                                          : "");
  }
}

bool on_one_host(const std::vector<std::string>& hosts) {
  return std::all_of(hosts.begin(), hosts.end(),
                     [&](const std::string& host) { return host == hosts.front(); });
}

/// "a: {0, 1}, b: {2}"
std::string hosts_text(const GroupOptions& options) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t i = 0; i < options.hosts.size(); ++i)
    ranks[options.hosts[i]].push_back(options.global_ranks[i]);
  std::vector<std::string> texts;
  texts.reserve(ranks.size());
  for (const auto& [host, on_it] : ranks)
    texts.push_back(host.substr(0, host.find('/')) + ": {" + list_text(on_it) + "}");
  return c10::Join(", ", texts);
}

/// The backend's name, as far as hosts tell; the same on all ranks.
const char* best_for(const std::vector<std::string>& hosts) {
  if (on_one_host(hosts)) return kShm;
  // A rank that may not share memory has chosen gloo.
  const bool one_is_alone = std::any_of(hosts.begin(), hosts.end(), is_alone);
  return one_is_alone || !any_share_a_host(hosts) ? kGloo : kHosts;
}

/// Over shared memory where ranks have it in common, else over gloo; the same on all ranks.
c10::intrusive_ptr<c10d::Backend> make_best_backend(
    const GroupOptions& group, const std::function<BackendOptions(const char*)>& options) {
  const std::string best = best_for(group.hosts);
  if (best != kGloo) {
    try {
      return best == kShm ? make_shm_backend(options(kShm))
                          : make_hosts_backend(options(kHosts), group.hosts);
    } catch (const ShmRefused& error) {
      if (group.rank == 0) {
        TORCH_WARN_ONCE("group '", group.name, "' has no shared memory and uses gloo, which is ",
                        "slower: ", error.what());
      }
    }
  }
  return make_backend(kGloo, options(kGloo));
}

struct DerivedGroups {
  std::mutex mutex;
  struct Derived {
    ProcessGroup from;  // kept, so that its address stays its own
    ProcessGroup made;
  };
  /// By the group they came from and what they are for.
  std::map<std::pair<c10d::ProcessGroup*, std::string>, Derived> made;
};
DerivedGroups& derived_groups() {
  static auto* groups = new DerivedGroups();
  return *groups;
}

/// The backends for groups like one that is there.
Backends backends_of(const ProcessGroup& group) {
  Backends backends;
  for (const c10::Device& device : group->getDeviceTypes()) {
    const std::string name = group->getBackend(device.type())->getBackendName();
    backends[device.type()] = name == kHosts ? kBest : name;
  }
  return backends;
}

/// Of a group's ranks, if its backend has to do with them.
std::vector<std::string> known_hosts(const ProcessGroup& group) {
  if (!has_backend(group, c10::kCPU)) return {};
  return hosts_of_backend(*group->getBackend(c10::kCPU));
}

/// Of ranks of the world; empty if that is not known.
std::vector<std::string> hosts_of(const std::vector<int>& ranks) {
  std::vector<std::string> hosts;
  hosts.reserve(ranks.size());
  for (const int rank : ranks) {
    if (!is_initialized() || static_cast<size_t>(rank) >= world().hosts.size()) return {};
    hosts.push_back(world().hosts[static_cast<size_t>(rank)]);
  }
  return hosts;
}

/// Of this rank and its neighbours, `size` of them.
ProcessGroup derive(const ProcessGroup& group, int size, const std::string& purpose,
                    const Backends& backends) {
  DerivedGroups& groups = derived_groups();
  const std::lock_guard lock(groups.mutex);
  const auto found = groups.made.find({group.get(), purpose});
  if (found != groups.made.end()) return found->second.made;
  const int first = group->getRank() / size * size;
  const std::string block = size == group->getSize() ? "" : "/" + std::to_string(first);
  GroupOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(purpose + block, group->getStore());
  options.rank = group->getRank() - first;
  const std::vector<int> ranks = global_ranks(group);
  options.global_ranks.assign(ranks.begin() + first, ranks.begin() + first + size);
  options.backends = backends;
  if (const std::vector<std::string> hosts = known_hosts(group); !hosts.empty())
    options.hosts.assign(hosts.begin() + first, hosts.begin() + first + size);
  options.name = group->getGroupName() + "/" + purpose + block;
  options.timeout =
      group->getBackend(group->getDeviceTypes().front().type())->getBackendOptions()->timeout;
  if (is_initialized()) options.master_addr = world().master_addr;
  const ProcessGroup made = make_group(options);
  groups.made[{group.get(), purpose}] = {group, made};
  return made;
}

}  // namespace

Backends parse_backends(const std::string& text) {
  if (text.empty()) {
    Backends backends = {{c10::kCPU, may_share_memory() ? kBest : kGloo}};
    if (nccl_is_built() && torch::cuda::is_available()) backends[c10::kCUDA] = "nccl";
    return backends;
  }
  if (text == kFake) return {{c10::kCPU, kFake}, {c10::kMeta, kFake}};
  Backends backends;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const size_t colon = part.find(':');
    const std::string name = colon == std::string::npos ? part : part.substr(colon + 1);
    const c10::DeviceType type = colon == std::string::npos
                                     ? (name == "nccl" ? c10::kCUDA : c10::kCPU)
                                     : device_type(part.substr(0, colon), text);
    check_backend(type, name, text);
    TORCH_CHECK(backends.emplace(type, name).second, "init_process_group: backend '", text,
                "' names ", c10::DeviceTypeName(type, true), " twice");
  }
  return backends;
}

bool is_fake(const Backends& backends) { return backends.begin()->second == kFake; }

ProcessGroup make_group(const GroupOptions& options) {
  watch_exits();
  const int size = static_cast<int>(options.global_ranks.size());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(options.store, options.rank, size);
  const auto backend_options = [&](const char* name) {
    BackendOptions made_for;
    made_for.store = c10::make_intrusive<c10d::PrefixStore>(name, options.store);
    made_for.rank = options.rank;
    made_for.global_ranks = options.global_ranks;
    made_for.group_name = options.name;
    made_for.timeout = options.timeout;
    made_for.master_addr = options.master_addr;
    return made_for;
  };
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> made;
  bool connects = false;
  for (const auto& [type, name] : options.backends) {
    c10::intrusive_ptr<c10d::Backend>& backend = made[name];
    if (!backend) {
      TORCH_CHECK(name != kShm || on_one_host(options.hosts), "group '", options.name,
                  "': backend 'shm' is for ranks of one host, but there are several (",
                  hosts_text(options), "): use 'gloo', or no backend, which picks for each group");
      backend = name == kBest ? make_best_backend(options, backend_options)
                              : make_backend(name, backend_options(name.c_str()));
    }
    const std::string is = backend->getBackendName();
    if (is != kShm && is != kFake) connects = true;
    const auto kind = c10d::ProcessGroup::strToBackendType(is);
    group->setBackend(type, kind, backend);
    group->setDefaultBackend(kind);
  }
  group->setGroupName(options.name);
  group->setGroupDesc(options.name);
  // A rank that is connected must not leave before the others are.
  if (size > 1 && connects) {
    wait_for_ranks(c10::make_intrusive<c10d::PrefixStore>("connected", options.store),
                   options.global_ranks[static_cast<size_t>(options.rank)], options.global_ranks,
                   "", "group '" + options.name + "'", options.timeout);
  }
  return group;
}

ProcessGroup make_group_of_members(const std::vector<int>& ranks, const std::string& key,
                                   const std::string& name,
                                   std::optional<std::chrono::milliseconds> asked_timeout) {
  const World& in = world();
  const std::chrono::milliseconds timeout = asked_timeout.value_or(in.timeout);
  GroupOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(key, in.store);
  if (!is_fake(in.backends)) {
    const std::string members = list_text(ranks);
    const std::string first =
        wait_for_ranks(options.store, in.rank, ranks, members, "group '" + name + "'", timeout);
    TORCH_CHECK(first == members, "group '", name, "' has ranks {", members, "} on rank ", in.rank,
                " but {", first, "} on rank ", ranks.front(),
                ": all ranks must make the same groups in the same order");
  }
  options.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), in.rank) - ranks.begin());
  options.global_ranks = ranks;
  options.backends = in.backends;
  options.hosts = hosts_of(ranks);
  options.name = name;
  options.timeout = timeout;
  options.master_addr = in.master_addr;
  return make_group(options);
}

ProcessGroup second_group(const ProcessGroup& group) {
  if (group->getSize() == 1) return group;
  return derive(group, group->getSize(), "second", backends_of(group));
}

ProcessGroup host_group(const ProcessGroup& group) {
  if (group->getSize() == 1) return group;
  const Backends backends = backends_of(group);
  if (is_fake(backends)) return group;
  return derive(group, group->getSize(), "host", {{c10::kCPU, "gloo"}});
}

ProcessGroup neighbour_group(const ProcessGroup& group, int64_t size) {
  return derive(group, static_cast<int>(size), "neighbours" + std::to_string(size),
                backends_of(group));
}

void forget_derived_groups() {
  DerivedGroups& groups = derived_groups();
  const std::lock_guard lock(groups.mutex);
  groups.made.clear();
}

bool has_backend(const ProcessGroup& group, c10::DeviceType type) {
  const std::vector<c10::Device> devices = group->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [type](const c10::Device& device) { return device.type() == type; });
}

std::vector<int> global_ranks(const ProcessGroup& group) {
  const c10::DeviceType type = group->getDeviceTypes().front().type();
  const std::vector<uint64_t> known =
      group->getBackend(type)->getBackendOptions()->global_ranks_in_group;
  if (!known.empty()) return {known.begin(), known.end()};
  std::vector<int> ranks;
  for (const std::string& rank : all_gather_bytes(std::to_string(get_rank()), group))
    ranks.push_back(std::stoi(rank));
  return ranks;
}

}  // namespace fsdp2::comm
