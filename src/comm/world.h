#pragma once

// The world that this process has joined.

#include "comm/groups.h"

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace fsdp2::comm {

struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  c10::Device device = c10::kCPU;
  Backends backends;
  /// Of each rank; equal where ranks can share memory.
  std::vector<std::string> hosts;
  std::chrono::milliseconds timeout{};
  std::string master_addr;
  c10::intrusive_ptr<c10d::Store> store;
  /// This process serves the store, so that it must leave last.
  bool serves_store = false;
  ProcessGroup group;
  /// Calls of new_group and the like so far: the same number on all ranks.
  int64_t groups_made = 0;
};

/// Error when init_process_group has not run.
World& world();

}  // namespace fsdp2::comm
