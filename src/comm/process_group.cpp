#include "comm/environment.h"
#include "comm/groups.h"
#include "comm/host_presence.h"
#include "comm/rendezvous.h"
#include "comm/world.h"

#include <fsdp2/collectives.h>
#include <fsdp2/process_group.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <memory>
#include <numeric>

namespace fsdp2 {
namespace {

using comm::World;

std::unique_ptr<World>& current() {
  // Never destroyed: a world that was not left at exit has threads that must not meet static
  // destruction.
  static auto* world = new std::unique_ptr<World>();
  return *world;
}

c10::Device device_of(const comm::Backends& backends, int local_rank) {
  if (!backends.contains(c10::kCUDA)) return c10::kCPU;
  const int count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  TORCH_CHECK(local_rank < count, "init_process_group: LOCAL_RANK is ", local_rank, " but ", count,
              " CUDA devices are visible: start at most ", count,
              " ranks on this host, or use backend 'gloo' on CPU");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void make_world_group(World& world) {
  comm::GroupOptions group;
  group.store = c10::make_intrusive<c10d::PrefixStore>("world", world.store);
  group.rank = world.rank;
  group.global_ranks = all_ranks(world.size);
  group.backends = world.backends;
  group.hosts = world.hosts;
  group.name = "world";
  group.timeout = world.timeout;
  group.master_addr = world.master_addr;
  world.group = comm::make_group(group);
}

/// Joins through the store in `world`, and fills in the rest of it.
void join(World& world, const comm::Membership& membership) {
  comm::Meeting meeting = comm::meet(world.store, membership, world.timeout);
  world.local_rank = meeting.local_rank;
  world.hosts = std::move(meeting.hosts);
  world.device = device_of(world.backends, world.local_rank);
  if (world.device.is_cuda()) c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(world.device);
  make_world_group(world);
  // Rank 0, which may serve the store, is not to end while others still connect through it.
  if (world.backends.contains(c10::kCPU)) wait(barrier(world.group), "init_process_group");
}

std::unique_ptr<World> make_fake_world(const InitOptions& options) {
  TORCH_CHECK(options.rank && options.world_size,
              "init_process_group: backend 'fake' plays one rank of a world that is not there: "
              "give InitOptions::rank and InitOptions::world_size");
  TORCH_CHECK(*options.world_size > 0 && *options.rank >= 0 && *options.rank < *options.world_size,
              "init_process_group: InitOptions::rank is ", *options.rank, ", outside 0 to ",
              *options.world_size - 1, " (InitOptions::world_size is ", *options.world_size, ")");
  auto world = std::make_unique<World>();
  world->rank = *options.rank;
  world->size = *options.world_size;
  world->backends = comm::parse_backends(options.backend);
  world->timeout = options.timeout;
  world->store = c10::make_intrusive<c10d::HashStore>();
  make_world_group(*world);
  return world;
}

}  // namespace

World& comm::world() {
  TORCH_CHECK(current(),
              "the process group is not initialised: call fsdp2::init_process_group() first");
  return *current();
}

void init_process_group(const InitOptions& options) {
  TORCH_CHECK(!current(), "init_process_group: already initialised (rank ", current()->rank, " of ",
              current()->size, "): call destroy_process_group() before joining again");
  if (options.backend == "fake") {
    current() = make_fake_world(options);
    return;
  }
  const comm::Membership membership = comm::read_membership(options);
  auto joined = std::make_unique<World>();
  joined->rank = membership.rank;
  joined->size = membership.world_size;
  joined->backends = comm::parse_backends(options.backend);
  joined->timeout = options.timeout;
  joined->master_addr = membership.master_addr;
  joined->serves_store = !options.store && comm::serves_store(membership);
  if (membership.local_rank) device_of(joined->backends, *membership.local_rank);

  const comm::StorePtr store =
      options.store ? options.store : comm::open_store(membership, options.timeout);
  try {
    const bool use_cuda = joined->backends.contains(c10::kCUDA);
    joined->store = comm::enter(store, membership, use_cuda, options.timeout);
    join(*joined, membership);
  } catch (const std::exception& error) {
    if (joined->store) comm::leave(joined->store, joined->serves_store);
    if (!options.store) comm::forget_store(membership);
    // c10d's own words do not say what was going on.
    TORCH_CHECK(!dynamic_cast<const c10::DistError*>(&error), "init_process_group: rank ",
                membership.rank, " of ", membership.world_size,
                " lost the store while joining the world: it ends with the process that serves it ",
                "(rank 0 or the launcher). The cause: ", comm::plain_message(error));
    throw;
  }
  current() = std::move(joined);
}

bool is_initialized() { return current() != nullptr; }

void destroy_process_group() {
  World& world = comm::world();
  comm::forget_presences();
  comm::forget_derived_groups();
  comm::leave(world.store, world.serves_store);
  current().reset();
}

int get_rank() { return current() ? current()->rank : 0; }

int get_world_size() { return current() ? current()->size : 1; }

int get_local_rank() {
  return current() ? current()->local_rank
                   : comm::number_from_environment("LOCAL_RANK").value_or(0);
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
    TORCH_CHECK(ranks[i] >= 0 && ranks[i] < world.size, "new_group: `ranks` has ", ranks[i],
                ", outside 0 to ", world.size - 1, " (the world's size is ", world.size, ")");
    TORCH_CHECK(std::find(ranks.begin(), ranks.begin() + i, ranks[i]) == ranks.begin() + i,
                "new_group: `ranks` has ", ranks[i], " twice");
  }
  TORCH_CHECK(!timeout || timeout->count() > 0, "new_group: `timeout` is ", timeout->count(),
              " ms: it must be positive");
  const std::string key = "group/" + std::to_string(world.groups_made++);
  if (std::find(ranks.begin(), ranks.end(), world.rank) == ranks.end()) return {};
  return comm::make_group_of_members(ranks, key, name.empty() ? key : name, timeout);
}

}  // namespace fsdp2
