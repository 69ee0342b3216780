#include <fsdp2/process_group.h>

#include "comm/environment.h"
#include "comm/groups.h"
#include "comm/rendezvous.h"
#include "comm/world.h"

#include <fsdp2/collectives.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <memory>
#include <thread>

namespace fsdp2 {
namespace {

using comm::World;

std::unique_ptr<World>& current() {
  // Never destroyed: a world that was not left at exit has threads that must not meet static destruction.
  static auto* world = new std::unique_ptr<World>();
  return *world;
}

c10::Device device_of(const comm::Backends& backends, int local_rank) {
  if (!backends.contains(c10::kCUDA)) return c10::kCPU;
  const int count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  TORCH_CHECK(local_rank < count, "init_process_group: LOCAL_RANK is ", local_rank, " but ", count,
              " CUDA devices are visible: start at most ", count, " ranks on this host, or use backend 'gloo' on CPU");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  return ranks;
}

/// Nobody needs the store any more once all ranks are through.
void leave_together(const World& world) {
  if (world.backends.contains(c10::kCPU)) {
    wait(barrier(world.group), "init_process_group");
  } else {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("ready", world.store);
    comm::wait_for_ranks(store, world.rank, all_ranks(world.size), "", "the world", world.timeout);
  }
}

}  // namespace

World& comm::world() {
  TORCH_CHECK(current(), "the process group is not initialised: call fsdp2::init_process_group() first");
  return *current();
}

void init_process_group(const InitOptions& options) {
  TORCH_CHECK(!current(), "init_process_group: already initialised (rank ", current()->rank, " of ", current()->size,
              "): call destroy_process_group() before joining again");
  const comm::Membership membership = comm::read_membership(options);
  auto joined = std::make_unique<World>();
  joined->backends = comm::parse_backends(options.backend);
  const bool use_cuda = joined->backends.contains(c10::kCUDA);
  if (membership.local_rank) device_of(joined->backends, *membership.local_rank);

  const bool own_store = !options.store;
  try {
    const comm::StorePtr store = own_store ? comm::open_store(membership, options.timeout) : options.store;
    const comm::Meeting meeting = comm::meet(store, membership, use_cuda, options.timeout);
    joined->rank = membership.rank;
    joined->size = membership.world_size;
    joined->local_rank = meeting.local_rank;
    joined->device = device_of(joined->backends, meeting.local_rank);
    joined->timeout = options.timeout;
    joined->master_addr = membership.master_addr;
    joined->store = meeting.store;
    joined->serves_store =
        own_store && membership.rank == 0 && !membership.master_addr.empty() && !membership.agent_store;
    if (use_cuda) c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(joined->device);

    comm::GroupOptions group;
    group.store = c10::make_intrusive<c10d::PrefixStore>("world", meeting.store);
    group.rank = joined->rank;
    group.global_ranks = all_ranks(joined->size);
    group.backends = joined->backends;
    group.name = "world";
    group.timeout = options.timeout;
    group.master_addr = membership.master_addr;
    joined->group = comm::make_group(group);
    leave_together(*joined);
  } catch (...) {
    if (own_store) comm::forget_store(membership);
    throw;
  }
  current() = std::move(joined);
}

bool is_initialized() { return current() != nullptr; }

void destroy_process_group() {
  World& world = comm::world();
  comm::forget_second_groups();
  try {
    const int64_t left = world.store->add("left", 1);
    // Others may still be making groups. One that failed never says that it left.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    for (int64_t now = left; world.serves_store && now < world.size && std::chrono::steady_clock::now() < deadline;
         now = world.store->add("left", 0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } catch (const std::exception&) {  // the store ended first
  }
  current().reset();
}

int get_rank() { return current() ? current()->rank : 0; }

int get_world_size() { return current() ? current()->size : 1; }

int get_local_rank() {
  return current() ? current()->local_rank : comm::number_from_environment("LOCAL_RANK").value_or(0);
}

c10::Device get_device() {
  return current() ? current()->device : device_of(comm::parse_backends(""), get_local_rank());
}

ProcessGroup world_group() { return comm::world().group; }

ProcessGroup new_group(const std::vector<int>& ranks, const std::string& name,
                       std::optional<std::chrono::milliseconds> timeout) {
  World& world = comm::world();
  TORCH_CHECK(!ranks.empty(), "new_group: `ranks` is empty");
  for (size_t i = 0; i < ranks.size(); ++i) {
    TORCH_CHECK(ranks[i] >= 0 && ranks[i] < world.size, "new_group: `ranks` has ", ranks[i], ", outside 0 to ",
                world.size - 1, " (the world's size is ", world.size, ")");
    TORCH_CHECK(std::find(ranks.begin(), ranks.begin() + i, ranks[i]) == ranks.begin() + i, "new_group: `ranks` has ",
                ranks[i], " twice");
  }
  TORCH_CHECK(!timeout || timeout->count() > 0, "new_group: `timeout` is ", timeout->count(),
              " ms: it must be positive");
  const std::string key = "group/" + std::to_string(world.groups_made++);
  if (std::find(ranks.begin(), ranks.end(), world.rank) == ranks.end()) return {};
  return comm::make_group_of_members(ranks, key, name.empty() ? key : name, timeout);
}

}  // namespace fsdp2
