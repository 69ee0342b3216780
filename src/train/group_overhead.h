#pragma once

// What a step costs above its compute, by the number of parameter groups and their size.

#include <cstdint>

namespace fsdp2::train {

struct GroupBenchOptions {
  int64_t groups = 4;   // one layer each
  int64_t bytes = 256;  // of parameters a group, about: a layer is square
  int64_t steps = 20;   // timed, after some that are not
  bool meta = false;    // by sizes alone; in a world of backend "fake"
};

/// Medians of the steps, each the slowest rank's. A step is forward and backward.
struct GroupCost {
  int64_t groups = 0;
  int64_t bytes = 0;  // of parameters a group, exactly
  int ranks = 0;
  double plain_us = 0;  // of the same layers, not wrapped, on all ranks at the same time
  double sharded_us = 0;
  int64_t all_gathers = 0;  // of one step; 0 where there is one rank

  double overhead_us() const { return sharded_us - plain_us; }
  double group_us() const { return overhead_us() / static_cast<double>(groups); }
};

/// Collective over the world; the same figures on all ranks. One compute thread a rank.
GroupCost measure_groups(const GroupBenchOptions& options);

}  // namespace fsdp2::train
