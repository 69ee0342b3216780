#include "comm/rendezvous.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include <unistd.h>

namespace fsdp2::comm {
namespace {

std::map<std::string, StorePtr>& served_stores() {
  // Never destroyed: a store's threads may outlive static destruction.
  static auto* stores = new std::map<std::string, StorePtr>();
  return *stores;
}

std::string endpoint(const Membership& membership) {
  return membership.master_addr + ":" + std::to_string(membership.master_port);
}

/// What a rank tells the others about where it runs.
struct Site {
  std::string host;
  std::string node;  // the launcher's number for the host, if any
  int local_rank = -1;
  std::string devices;  // empty: no CUDA
  int pid = 0;

  std::string text() const {
    return c10::str(host, '\t', node, '\t', local_rank, '\t', devices, '\t', pid);
  }
  static Site parse(const std::string& text) {
    std::istringstream in(text);
    std::string local_rank, pid;
    Site site;
    std::getline(in, site.host, '\t');
    std::getline(in, site.node, '\t');
    std::getline(in, local_rank, '\t');
    std::getline(in, site.devices, '\t');
    std::getline(in, pid, '\t');
    site.local_rank = std::stoi(local_rank);
    site.pid = std::stoi(pid);
    return site;
  }
};

Site this_site(const Membership& membership, bool use_cuda) {
  Site site;
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  // Two machines may have one name, but they did not boot as one.
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  site.host = std::string(name) + "/" + boot;
  if (const char* node = std::getenv("GROUP_RANK")) site.node = node;
  site.local_rank = membership.local_rank.value_or(-1);
  if (use_cuda) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    site.devices = std::string("cuda:") + (visible ? visible : "all");
  }
  site.pid = getpid();
  return site;
}

std::string rank_key(int rank) { return "rank/" + std::to_string(rank); }

/// How often this rank has joined a world at this store, this time included.
int64_t join_number(const StorePtr& store, const Membership& membership, const Site& site,
                    std::chrono::milliseconds timeout) {
  const std::string rank = std::to_string(membership.rank);
  const int64_t number = store->add("fsdp2/joins/" + rank, 1);
  const std::string last_key = "fsdp2/last/" + rank;
  if (number > 1) {
    store->wait({last_key}, timeout);
    const Site last = Site::parse(store->get_to_str(last_key));
    const bool other_lives = last.host == site.host && last.pid != site.pid && kill(last.pid, 0) == 0;
    TORCH_CHECK(!other_lives, "init_process_group: RANK ", rank, " is taken by process ", last.pid,
                " on this host, which still runs: give each process its own RANK");
  }
  store->set(last_key, site.text());
  return number;
}

bool same_device(const Site& a, const Site& b) {
  if (a.host != b.host || a.local_rank != b.local_rank) return false;
  if (!a.devices.empty() && a.devices == b.devices) return true;
  // Without CUDA the launcher may play several hosts on one.
  return a.devices.empty() && b.devices.empty() && a.node == b.node;
}

}  // namespace

std::string duration_text(std::chrono::milliseconds duration) {
  const auto count = duration.count();
  return count % 1000 == 0 ? c10::str(count / 1000, " s") : c10::str(count, " ms");
}

std::string list_text(const std::vector<int>& numbers) { return c10::Join(", ", numbers); }

std::string plain_message(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

StorePtr open_store(const Membership& membership, std::chrono::milliseconds timeout) {
  if (membership.master_addr.empty()) return c10::make_intrusive<c10d::HashStore>();
  StorePtr& kept = served_stores()[endpoint(membership)];
  if (kept) return kept;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(membership.master_port);
  options.isServer = membership.rank == 0 && !membership.agent_store;
  options.numWorkers = membership.world_size;
  options.waitWorkers = false;  // meet() waits, and knows who is missing
  options.timeout = timeout;
  options.multiTenant = true;
  try {
    kept = c10::make_intrusive<c10d::TCPStore>(membership.master_addr, options);
  } catch (const std::exception& error) {
    const std::string reason = plain_message(error);
    TORCH_CHECK(!options.isServer || reason.find("EADDRINUSE") == std::string::npos,
                "init_process_group: port ", membership.master_port, " (MASTER_PORT) is in use on this host, so that ",
                "rank 0 cannot listen there: choose a free port, the same for all ranks");
    TORCH_CHECK(false, "init_process_group: rank ", membership.rank, " of ", membership.world_size, " could not ",
                options.isServer ? "listen at " : "reach the store at ", endpoint(membership),
                " (MASTER_ADDR, MASTER_PORT) within ", duration_text(timeout), ": ",
                options.isServer ? "rank 0 must run on that host"
                                 : membership.agent_store ? "the launcher must be running there"
                                                          : "rank 0 must be running there, with the same port",
                ". The cause: ", reason);
  }
  return kept;
}

void forget_store(const Membership& membership) { served_stores().erase(endpoint(membership)); }

std::string wait_for_ranks(const StorePtr& store, int rank, const std::vector<int>& ranks, const std::string& value,
                           const std::string& what, std::chrono::milliseconds timeout) {
  store->set(rank_key(rank), value);
  std::vector<std::string> keys;
  for (int other : ranks) keys.push_back(rank_key(other));
  try {
    store->wait(keys, timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    try {
      for (int other : ranks) {
        if (!store->check({rank_key(other)})) missing.push_back(other);
      }
    } catch (const std::exception&) {  // the store itself is gone
    }
    TORCH_CHECK(missing.empty(), "rank ", rank, " waited ", duration_text(timeout), " for ranks {",
                list_text(missing), "} of {", list_text(ranks), "} to join ", what,
                ": did they start, with the same address and port, and are they still running?");
    TORCH_CHECK(false, "rank ", rank, " lost the store while joining ", what,
                " (it ends with the process that serves it: rank 0 or the launcher). The cause: ",
                plain_message(error));
  }
  return store->get_to_str(keys.front());
}

Meeting meet(const StorePtr& store, const Membership& membership, bool use_cuda, std::chrono::milliseconds timeout) {
  const Site site = this_site(membership, use_cuda);
  const int64_t number = join_number(store, membership, site, timeout);
  Meeting meeting;
  meeting.store = c10::make_intrusive<c10d::PrefixStore>("fsdp2/" + std::to_string(number), store);
  std::vector<int> ranks(membership.world_size);
  for (int rank = 0; rank < membership.world_size; ++rank) ranks[rank] = rank;
  wait_for_ranks(meeting.store, membership.rank, ranks, site.text(), "the world", timeout);

  std::vector<Site> sites;
  for (int rank : ranks) sites.push_back(Site::parse(meeting.store->get_to_str(rank_key(rank))));
  // A rank without LOCAL_RANK counts those before it on its host.
  for (int rank : ranks) {
    Site& current = sites[rank];
    const bool given = current.local_rank >= 0;
    int before = 0;
    for (int other = 0; other < rank; ++other) before += sites[other].host == current.host;
    if (!given) current.local_rank = before;
    for (int other = 0; other < rank; ++other) {
      TORCH_CHECK(!same_device(current, sites[other]), "init_process_group: ranks ", other, " and ", rank,
                  " are both on host ", current.host.substr(0, current.host.find('/')), " with LOCAL_RANK ",
                  current.local_rank, ", and would share a device: give each rank of a host its own LOCAL_RANK, 0 ",
                  "and up");
    }
  }
  meeting.local_rank = sites[membership.rank].local_rank;
  return meeting;
}

}  // namespace fsdp2::comm
