#pragma once

// What a communication backend is to the rest of the library: one function that makes it.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace fsdp2::comm {

struct BackendOptions {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;  // in the group
  std::vector<int> global_ranks;
  std::string group_name;
  std::chrono::milliseconds timeout{};
  /// Where rank 0 is reached, if known: peers are reached over the same interface.
  std::string master_addr;
};

/// Blocks until all ranks of the group have called it.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendOptions& options);

/// For CPU tensors of ranks on one host. Blocks until all ranks of the group have called it.
/// ShmRefused (shm_segment.h) on all ranks if one of them cannot share memory.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendOptions& options);

/// For CPU tensors of ranks on several hosts, the host of each in `hosts`: through shared memory
/// inside each host and gloo between them. Otherwise as make_shm_backend.
c10::intrusive_ptr<c10d::Backend> make_hosts_backend(const BackendOptions& options,
                                                     const std::vector<std::string>& hosts);

bool nccl_is_built();
/// Error if NCCL is not built in. Connects at the first collective.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendOptions& options);

/// Sends nothing and meets nobody: collectives are done at once, as if every rank had passed what
/// this one passes. On CPU and meta tensors.
c10::intrusive_ptr<c10d::Backend> make_fake_backend(const BackendOptions& options);

}  // namespace fsdp2::comm
