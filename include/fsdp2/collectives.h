#pragma once

// Collectives over a process group, with the checks c10d leaves out: sizes and dtypes are verified
// before anything is sent, an average is divided here where the backend cannot (gloo would return
// the sum), and a wait that times out says which collective and which group. A group of one rank
// does no communication.

#include <fsdp2/process_group.h>

#include <torch/types.h>

#include <string>
#include <vector>

namespace fsdp2 {

enum class ReduceOp { kSum, kAvg, kMax, kMin, kProduct };

/// Every function below starts the collective and returns its work; the result is there after
/// wait(work), which the caller must not leave out: an average is finished there. Tensors are
/// plain, contiguous, on one device, and kept alive by the work; autograd does not see the writes.
/// Collective: same order and sizes on all ranks of the group. Any dtype can be moved; floating and
/// complex ones, int8, uint8, int32 and int64 can be reduced (kAvg: floating and complex; complex:
/// kSum and kAvg).

/// output [world * n] = the inputs [n] of all ranks, in rank order.
Work all_gather_single(const torch::Tensor& output, const torch::Tensor& input,
                       const ProcessGroup& group);
/// output [n] = this rank's n elements of the reduced input [world * n].
Work reduce_scatter_single(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op,
                           const ProcessGroup& group);
Work all_reduce(const torch::Tensor& tensor, ReduceOp op, const ProcessGroup& group);
/// `source` is a rank of the group.
Work broadcast(const torch::Tensor& tensor, int source, const ProcessGroup& group);
/// output [n] = this rank's n elements of the input [world * n] of `source`, a rank of the group.
/// On other ranks `input` is undefined.
Work scatter(const torch::Tensor& output, const torch::Tensor& input, int source,
             const ProcessGroup& group);
/// input [sum of input_splits]: to rank i its i-th run of input_splits[i] elements; output: what
/// the ranks sent here, in their order. Elements sent and expected must agree.
Work all_to_all_single(const torch::Tensor& output, const torch::Tensor& input,
                       const std::vector<int64_t>& output_splits,
                       const std::vector<int64_t>& input_splits, const ProcessGroup& group);
Work barrier(const ProcessGroup& group);

/// Blocks until the work is done (with CUDA: until the current stream waits for it). Error on
/// timeout or on a lost peer, naming the collective, the group, this rank and `what`. A null work
/// is done; a second wait does nothing.
void wait(const Work& work, const std::string& what = {});

/// Sends a small byte string from every rank to every rank. Collective.
std::vector<std::string> all_gather_bytes(const std::string& bytes, const ProcessGroup& group);

/// What this process has sent since the last reset, by kind; for tests and reports. A group of one
/// rank and empty tensors send nothing.
struct CollectiveCounts {
  int64_t all_gathers = 0, reduce_scatters = 0, all_reduces = 0, broadcasts = 0, scatters = 0,
          all_to_alls = 0, others = 0;
  int64_t bytes = 0;  // of the largest tensor of each collective
};
CollectiveCounts collective_counts();
void reset_collective_counts();

}  // namespace fsdp2
