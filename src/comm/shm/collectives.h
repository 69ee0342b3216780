#pragma once

// The collectives of backend "shm", as chunks. Lists of addresses are by rank of the group.

#include "comm/shm/work.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <cstdint>

namespace fsdp2::comm {

/// What one rank sends is the same for all: all-gather, broadcast, barrier.
class ShmSpread final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;
  bool write(uint32_t index, std::byte* to) override;
  void read(int peer, uint32_t index, const std::byte* from, bool last) override;

  const std::byte* send = nullptr;          // null: nothing
  std::byte* own = nullptr;                 // where else that goes here, if anywhere
  c10::SmallVector<std::byte*, 8> receive;  // null: not wanted
  int64_t bytes = 0;                        // of each
  int64_t capacity = 0;
};

/// Each rank sends something else to each: all-to-all, scatter, gather.
class ShmExchange final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;
  bool write(uint32_t index, std::byte* to) override;
  void read(int peer, uint32_t index, const std::byte* from, bool last) override;

  struct Part {
    std::byte* data = nullptr;
    int64_t bytes = 0;
    int64_t moved = 0;
  };
  c10::SmallVector<Part, 8> send, receive;
  int rank = 0;
  int64_t capacity = 0;
  const Presence* who = nullptr;
};

/// What all reductions have in common.
class ShmReduction : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;

  int rank = 0, size = 1;
  int64_t bytes = 0;  // of the result
  int64_t capacity = 0;
  c10::ScalarType type{};
  c10d::ReduceOp::RedOpType op{};

 protected:
  void reduce(std::byte* output, c10::ArrayRef<const std::byte*> inputs, int64_t count) const;
  /// Bytes of a chunk for each rank.
  int64_t share() const { return capacity / size / 64 * 64; }
};

/// Every rank reads all and reduces all of it, or nothing.
class ShmReduceWhole final : public ShmReduction {
 public:
  using ShmReduction::ShmReduction;
  bool write(uint32_t index, std::byte* to) override;
  void read_all(uint32_t index, std::span<const std::byte*> from) override;

  const std::byte* send = nullptr;
  std::byte* output = nullptr;  // null: not wanted
};

/// Every rank reads and reduces its part.
class ShmReduceScatter final : public ShmReduction {
 public:
  using ShmReduction::ShmReduction;
  bool write(uint32_t index, std::byte* to) override;
  void read_all(uint32_t index, std::span<const std::byte*> from) override;

  c10::SmallVector<const std::byte*, 8> send;
  std::byte* output = nullptr;
};

/// Block by block, every rank reduces its part and sends the result to all. The first two blocks'
/// inputs are sent before the first block's result, and so on, so that nobody waits for a result
/// that is not there yet.
class ShmReduceInBlocks final : public ShmReduction {
 public:
  using ShmReduction::ShmReduction;
  bool can_write(uint32_t index) const override;
  bool write(uint32_t index, std::byte* to) override;
  void read_all(uint32_t index, std::span<const std::byte*> from) override;

  std::byte* data = nullptr;

 private:
  struct Step {
    bool result;  // else inputs
    int64_t block;
  };
  Step step(uint32_t index) const;
  int64_t blocks() const;
  /// The part of a block that is `of` a rank's to reduce.
  std::pair<int64_t, int64_t> part(int64_t block, int of) const;

  int64_t reduced_ = 0;  // blocks
};

}  // namespace fsdp2::comm
