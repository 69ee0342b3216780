#pragma once

#include <torch/types.h>

namespace fsdp2::train {

/// What to read and what to predict, each [batch, seq] int64.
struct Batch {
  torch::Tensor x, y;
};

/// Synthetic tokens for benchmarks and comparisons, with something to learn in them: every odd
/// position follows from the one before, even ones come from a skewed distribution. A function of
/// its arguments only; `micro` counts micro-batches from the start of the run.
Batch synthetic_batch(uint64_t seed, int64_t micro, int64_t rank, int64_t batch, int64_t seq,
                      int64_t vocab);

}  // namespace fsdp2::train
