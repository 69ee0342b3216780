#pragma once

#include <cstdint>

namespace fsdp2::train {

/// Linear warm-up from 0, then a cosine down to `final_fraction` of the peak at the last step.
struct Schedule {
  double peak = 1e-3;
  int64_t warmup = 0;
  int64_t steps = 1;
  double final_fraction = 0.1;

  /// Of step `step`, counted from 0: step 0 of a warm-up of n takes peak / n; step `warmup` takes
  /// the peak; steps - 1 takes final_fraction * peak.
  double at(int64_t step) const;
};

}  // namespace fsdp2::train
