#pragma once

// Process groups: who takes part, and how they are found. Stores, groups and works are c10d's own types, so
// anything written against torch/csrc/distributed/c10d works with them.
// Follows torch.distributed.init_process_group (pytorch.org/docs/stable/distributed.html).

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

/// How to join the world. Every field that is left empty is read from the environment that torchrun (and
/// `fsdp2 run`) sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. With none of
/// these set and no field given, the world is this one process.
struct InitOptions {
  /// "gloo", "nccl" or "cpu:gloo,cuda:nccl"; empty picks gloo for CPU and nccl for CUDA when it is built.
  std::string backend;
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string master_addr;
  std::optional<int> master_port;
  /// Takes the place of address and port.
  c10::intrusive_ptr<c10d::Store> store;
  /// Of every wait in every group made here.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Joins the world; collective. Errors (before any connection is made): already initialised, rank outside
/// [0, world size), a variable that is missing, not a number, or contradicts a field, two ranks of a host on one
/// CUDA device; each names the variable. Sets the current CUDA device from LOCAL_RANK where there is CUDA.
/// Not thread-safe.
void init_process_group(const InitOptions& options = {});
bool is_initialized();
/// Collective. Groups that modules or meshes still hold stay usable until they are dropped.
void destroy_process_group();

/// Of the world; 0 and 1 before init_process_group. LOCAL_RANK counts within a host.
int get_rank();
int get_world_size();
int get_local_rank();
/// The device that this rank computes on: cuda:LOCAL_RANK with CUDA, else cpu.
c10::Device get_device();

/// The world's group. Error when init_process_group has not run.
ProcessGroup world_group();
/// A group of `ranks` (global, any order; group rank = position). Collective over the world: every rank calls it,
/// in the same order, members or not; a non-member gets null.
ProcessGroup new_group(const std::vector<int>& ranks, const std::string& name = {},
                       std::optional<std::chrono::milliseconds> timeout = std::nullopt);

}  // namespace fsdp2
