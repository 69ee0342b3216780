#include "comm/rendezvous.h"

#include "comm/shared_memory.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>

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
  std::string memory;  // equal where memory can be shared

  std::string text() const {
    return c10::str(host, '\t', node, '\t', local_rank, '\t', devices, '\t', pid, '\t', memory);
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
    std::getline(in, site.memory, '\t');
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
  site.memory = std::string(name) + '/' + host_identity();
  return site;
}

std::string rank_key(int rank) { return "rank/" + std::to_string(rank); }
std::string site_key(int rank) { return "site/" + std::to_string(rank); }

/// How often this rank has joined a world at this store, this time included.
int64_t join_number(const StorePtr& store, const Membership& membership, const Site& site,
                    std::chrono::milliseconds timeout) {
  const std::string rank = std::to_string(membership.rank);
  const int64_t number = store->add("fsdp2/joins/" + rank, 1);
  const std::string last_key = "fsdp2/last/" + rank;
  if (number > 1) {
    store->wait({last_key}, timeout);
    const Site last = Site::parse(store->get_to_str(last_key));
    const bool other_lives =
        last.host == site.host && last.pid != site.pid && kill(last.pid, 0) == 0;
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
  options.isServer = serves_store(membership);
  options.numWorkers = membership.world_size;
  options.waitWorkers = false;  // meet() waits, and knows who is missing
  options.timeout = timeout;
  options.multiTenant = true;
  try {
    kept = c10::make_intrusive<c10d::TCPStore>(membership.master_addr, options);
  } catch (const std::exception& error) {
    const std::string reason = plain_message(error);
    TORCH_CHECK(!options.isServer || reason.find("EADDRINUSE") == std::string::npos,
                "init_process_group: port ", membership.master_port,
                " (MASTER_PORT) is in use on this host, so that ",
                "rank 0 cannot listen there: choose a free port, the same for all ranks");
    TORCH_CHECK(false, "init_process_group: rank ", membership.rank, " of ", membership.world_size,
                " could not ", options.isServer ? "listen at " : "reach the store at ",
                endpoint(membership), " (MASTER_ADDR, MASTER_PORT) within ", duration_text(timeout),
                ": ",
                options.isServer         ? "rank 0 must run on that host"
                : membership.agent_store ? "the launcher must be running there"
                                         : "rank 0 must be running there, with the same port",
                ". The cause: ", reason);
  }
  return kept;
}

bool serves_store(const Membership& membership) {
  return membership.rank == 0 && !membership.master_addr.empty() && !membership.agent_store;
}

void forget_store(const Membership& membership) { served_stores().erase(endpoint(membership)); }

std::string wait_for_ranks(const StorePtr& store, int rank, const std::vector<int>& ranks,
                           const std::string& value, const std::string& what,
                           std::chrono::milliseconds timeout) {
  store->set(rank_key(rank), value);
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (int other : ranks) keys.push_back(rank_key(other));
  try {
    store->wait(keys, timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    try {
      for (int other : ranks) {
        if (!store->check({rank_key(other)})) missing.push_back(other);
      }
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store is gone, too
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

std::vector<std::string> exchange_texts(const StorePtr& store, int rank,
                                        const std::vector<int>& ranks, const std::string& value,
                                        const std::string& what,
                                        std::chrono::milliseconds timeout) {
  wait_for_ranks(store, rank, ranks, value, what, timeout);
  std::vector<std::string> keys, texts;
  keys.reserve(ranks.size());
  texts.reserve(ranks.size());
  for (int other : ranks) keys.push_back(rank_key(other));
  for (const std::vector<uint8_t>& text : store->multiGet(keys))
    texts.emplace_back(text.begin(), text.end());
  return texts;
}

StorePtr enter(const StorePtr& store, const Membership& membership, bool use_cuda,
               std::chrono::milliseconds timeout) {
  const Site site = this_site(membership, use_cuda);
  const int64_t number = join_number(store, membership, site, timeout);
  auto entered = c10::make_intrusive<c10d::PrefixStore>("fsdp2/" + std::to_string(number), store);
  entered->add("entered", 1);
  entered->set(site_key(membership.rank), site.text());
  return entered;
}

Meeting meet(const StorePtr& entered, const Membership& membership,
             std::chrono::milliseconds timeout) {
  std::vector<int> ranks(membership.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  wait_for_ranks(entered, membership.rank, ranks, "", "the world", timeout);
  std::vector<Site> sites;
  sites.reserve(ranks.size());
  for (int rank : ranks) sites.push_back(Site::parse(entered->get_to_str(site_key(rank))));
  for (int rank : ranks) {
    Site& site = sites[rank];
    const auto here = [&](const Site& other) { return other.host == site.host; };
    if (site.local_rank < 0) {
      site.local_rank = static_cast<int>(std::count_if(sites.begin(), sites.begin() + rank, here));
    }
    for (int other = 0; other < rank; ++other) {
      TORCH_CHECK(!same_device(site, sites[other]), "init_process_group: ranks ", other, " and ",
                  rank, " are both on host ", site.host.substr(0, site.host.find('/')),
                  " with LOCAL_RANK ", site.local_rank,
                  ", and would share a device: give each rank of a host its own, 0 and up");
    }
  }
  Meeting meeting;
  meeting.local_rank = sites[membership.rank].local_rank;
  meeting.hosts.reserve(sites.size());
  for (const Site& site : sites) meeting.hosts.push_back(site.memory);
  return meeting;
}

void leave(const StorePtr& entered, bool serves) {
  try {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    int64_t left = entered->add("left", 1);
    while (serves && left < entered->add("entered", 0) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      left = entered->add("left", 0);
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store ended first
  }
}

}  // namespace fsdp2::comm
