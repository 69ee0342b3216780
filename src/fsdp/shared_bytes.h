#pragma once

// One parameter group's whole parameters in memory that the ranks of a host share: every rank
// writes its own part in place, and all read the same bytes.
//
// Gathers of the group are numbered. Nobody writes for the next before all have let go of the last.

#include "comm/shared_memory.h"
#include "fsdp/copying_comm.h"

#include <memory>
#include <vector>

namespace fsdp2::fsdp {

/// Not thread-safe by itself: the schedule's lock guards it, but for letting go.
class SharedBytes final : public std::enable_shared_from_this<SharedBytes> {
 public:
  explicit SharedBytes(CommContextPtr context);

  /// Bytes of the parameters.
  int64_t size() const { return static_cast<int64_t>(bytes_ - offsets_.front()); }
  /// Whether the memory is there; make_memory() is collective.
  bool has_memory() const { return memory_ != nullptr; }
  void make_memory();

  /// The number of the next gather.
  uint64_t next() { return ++number_; }
  uint64_t number() const { return number_; }
  void agree_on(uint64_t number) { number_ = number; }

  /// Whether all have let go of the gathers before the current one; blocks if `wait`.
  bool free_to_write(bool wait) const;
  /// This rank's parts of the current gather are there from here on. With `again`, parts whose
  /// tensors were not written since last time are left as they are.
  void publish(const std::vector<torch::Tensor>& shards, bool again);
  /// Blocks until all ranks have published.
  void wait_for_all() const;
  /// The whole parameters, kept for this rank until the last of them is dropped.
  std::vector<c10::DataPtr> lease(const std::vector<torch::Tensor>& shards);
  /// This rank does not use the gather of that number (any more).
  void let_go(uint64_t number);

 private:
  struct Progress;
  /// What was copied last of a shard.
  struct Copied {
    const void* data = nullptr;
    int64_t version = -1;
    bool operator==(const Copied&) const = default;
  };
  Progress& progress(int64_t rank) const;
  void* whole(size_t param) const { return memory_->data() + offsets_[param]; }

  comm::Presence& presence() const { return *context_->host->presence(); }

  const CommContextPtr context_;
  std::shared_ptr<comm::SharedMemory> memory_;
  std::vector<size_t> offsets_;  // of parameters that are split
  size_t bytes_ = 0;
  std::vector<Copied> copied_;
  uint64_t number_ = 0;
};

std::unique_ptr<Gather> start_shared_gather(std::shared_ptr<SharedBytes> bytes,
                                            CommContextPtr context,
                                            const std::vector<torch::Tensor>& shards,
                                            const GatherWords& words);

}  // namespace fsdp2::fsdp
