#pragma once

// What interception adds to an op: on a gathered parameter, on a DTensor, and on neither.

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp2::train {

struct OpCost {
  std::string op;
  double plain_ns = 0;  // of the same call on plain tensors
  double ours_ns = 0;

  double added_ns() const { return ours_ns - plain_ns; }
};

/// Medians of `repeats` batches of calls, plain and ours in turn, one compute thread. The op that
/// touches no tensor of ours is compared with itself from before the kernels were registered: call
/// this before any fully_shard in the process. Collective over the world; figures are this rank's.
std::vector<OpCost> measure_ops(int64_t repeats);

}  // namespace fsdp2::train
