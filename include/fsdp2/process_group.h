#pragma once

// Process groups: who takes part, and how they are found. Stores, groups and works are c10d's own
// types, so anything written against torch/csrc/distributed/c10d works with them. Follows
// torch.distributed.init_process_group (pytorch.org/docs/stable/distributed.html).

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2 {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

/// How to join the world. Every field that is left empty is read from the environment that torchrun
/// (and `fsdp2 run`) sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT. With none of these set and no field given, the world is this one process.
struct InitOptions {
  /// "shm" (CPU only; ranks of one host, through memory that they share), "gloo" (CPU only), "nccl"
  /// (CUDA only) or a backend for each type of device: "cpu:shm,cuda:nccl". Empty picks for CPU,
  /// for each group, shm where its ranks are on one host and can share memory; "hosts", which is
  /// shm inside each host and gloo between them, where only some are; else gloo, and always gloo
  /// with FSDP2_SHARED_MEMORY=off in the environment; for CUDA nccl, where it is built and there is
  /// a device. "fake" plays `rank` of `world_size`, both of which must be given here, in this
  /// process alone: nothing is sent, and every collective is done at once, as if each rank had
  /// passed what this one passes (a sum is the own value times the number of ranks; what another
  /// rank would broadcast or scatter leaves the output as it is). On CPU and meta tensors.
  std::string backend{};
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::string master_addr{};
  std::optional<int> master_port{};
  /// Takes the place of address and port. May serve several worlds, one after the other.
  c10::intrusive_ptr<c10d::Store> store;
  /// Of joining, and of every wait in every group made here.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Joins the world; collective. Rank 0 serves the store at address and port, unless the launcher
/// does (TORCHELASTIC_USE_AGENT_STORE is "True"); without an address a world of one needs no store.
/// A served port stays taken until the process ends, so that the same world can be joined again
/// after destroy_process_group(). Errors before any connection is made: already initialised; RANK
/// outside [0, WORLD_SIZE); a variable that is missing, not a number, or contradicts a field; a
/// backend that is not built; LOCAL_RANK beyond the visible CUDA devices. Errors while joining: the
/// port is taken; the address is not served in time; ranks that did not come in time; a RANK that a
/// living process has; on all ranks alike, two ranks of a host with one LOCAL_RANK (unless
/// CUDA_VISIBLE_DEVICES differs, or on CPU GROUP_RANK). Each names the variable, address or ranks;
/// then nothing has been joined. Sets the current CUDA device to get_device(). gloo connects over
/// the interface that leads to the address; GLOO_SOCKET_IFNAME (a name, or several with commas)
/// overrides that. Not thread-safe.
void init_process_group(const InitOptions& options = {});
bool is_initialized();
/// Collective. Groups that modules or meshes still hold stay usable until they are dropped. The
/// rank that serves the store waits for the others to leave, at most 5 s.
void destroy_process_group();

/// Of the world; 0 and 1 before init_process_group. The local rank is LOCAL_RANK, or else counts
/// within a host.
int get_rank();
int get_world_size();
int get_local_rank();
/// The device that this rank computes on: cuda:<local rank> if the world has a backend for CUDA,
/// else cpu.
c10::Device get_device();

/// The world's group. Error when init_process_group has not run.
ProcessGroup world_group();
/// A group of `ranks` (global, any order; group rank = position). Collective over the world: every
/// rank calls it, in the same order, members or not; a non-member gets null. Error if members
/// disagree on `ranks`. `name` is for messages.
ProcessGroup new_group(const std::vector<int>& ranks, const std::string& name = {},
                       std::optional<std::chrono::milliseconds> timeout = std::nullopt);

}  // namespace fsdp2
