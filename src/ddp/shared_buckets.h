#pragma once

// The buckets of replicas on one host, in memory that all of its ranks see. Each rank makes the
// means of its part of every bucket where they lie, and copies the other parts from the ranks that
// made them.

#include "comm/shared_memory.h"

#include <fsdp2/process_group.h>

#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2::ddp {

/// Not thread-safe by itself. Buckets are posted in their order, all of them in every round.
class SharedBuckets {
 public:
  /// Moves what the buckets' storages hold there; views stay valid. Collective over `group`, which
  /// `presence` is of; the same sizes and dtypes on all ranks.
  SharedBuckets(const ProcessGroup& group, std::shared_ptr<comm::Presence> presence,
                std::vector<torch::Tensor> buckets);

  /// The next bucket of the round is filled: others may read it from now on. Makes the means that
  /// can be made without waiting.
  void post();
  /// All are posted: blocks until they hold the means, and nobody reads this rank's any more. The
  /// sums are formed in rank order, of 16-bit floats in float32, so all ranks get the same bits.
  /// After an error every later round fails, too.
  void finish();
  /// This round is void, on the other ranks too: they wait for nothing more of this rank.
  void give_up();

 private:
  struct Progress;
  Progress& progress(int rank) const;
  /// Bytes of all ranks' progress, before the buckets.
  size_t head() const;
  std::byte* place(int rank, size_t bucket) const;
  /// Means of this rank's part of posted buckets: of all that are left, or of those that all have
  /// posted.
  void average(bool wait);
  /// The parts of the bucket that others have averaged.
  void collect(size_t bucket, uint64_t number);
  /// Bytes of a bucket that are `rank`'s: from, to.
  std::pair<size_t, size_t> part(int rank, size_t bucket) const;
  uint64_t number_of(size_t bucket) const { return round_ * buckets_.size() + bucket + 1; }
  void check_intact() const;

  const std::shared_ptr<comm::Presence> presence_;
  const std::vector<torch::Tensor> buckets_;
  std::vector<size_t> offsets_;  // in each rank's memory; the last is its length
  std::shared_ptr<comm::SharedMemory> memory_;
  uint64_t round_ = 0;
  size_t posted_ = 0, averaged_ = 0;  // buckets of this round
  std::string broken_;
};

}  // namespace fsdp2::ddp
