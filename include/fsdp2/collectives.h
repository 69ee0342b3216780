#pragma once

// Collectives over a process group, with the checks c10d leaves out: sizes and dtypes are verified before
// anything is sent, an average is divided here where the backend cannot (gloo would return the sum), and a wait
// that times out says which collective and which group. A group of one rank does no communication.

#include <fsdp2/process_group.h>
#include <torch/types.h>

#include <string>
#include <vector>

namespace fsdp2 {

enum class ReduceOp { kSum, kAvg, kMax, kMin, kProduct };

/// Every function below starts the collective and returns its work; the tensors must stay alive until
/// wait(work). All tensors are contiguous and on one device. Collective: same order on all ranks of the group.

/// output [world * n] = the inputs [n] of all ranks, in rank order.
Work all_gather_single(const torch::Tensor& output, const torch::Tensor& input, const ProcessGroup& group);
/// output [n] = this rank's n elements of the reduced input [world * n].
Work reduce_scatter_single(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op,
                           const ProcessGroup& group);
Work all_reduce(const torch::Tensor& tensor, ReduceOp op, const ProcessGroup& group);
/// `source` is a rank of the group.
Work broadcast(const torch::Tensor& tensor, int source, const ProcessGroup& group);
Work barrier(const ProcessGroup& group);

/// Blocks until the work is done (with CUDA: until the current stream waits for it). Error on timeout or on a
/// lost peer, naming the collective, the group and this rank. A null work is done.
void wait(const Work& work, const std::string& what = {});

/// Sends a small byte string from every rank to every rank. Collective.
std::vector<std::string> all_gather_bytes(const std::string& bytes, const ProcessGroup& group);

/// What this process has started since the last reset, by kind; for tests and reports.
struct CollectiveCounts {
  int64_t all_gathers = 0, reduce_scatters = 0, all_reduces = 0, broadcasts = 0, others = 0;
  int64_t bytes = 0;  // of the largest tensor of each collective
};
CollectiveCounts collective_counts();
void reset_collective_counts();

}  // namespace fsdp2
