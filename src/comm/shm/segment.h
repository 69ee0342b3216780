#pragma once

// The memory of one group of backend "shm": what is where in it, and how ranks come to share it.

#include "comm/backend.h"
#include "comm/shared_memory.h"

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace fsdp2::comm {

enum class ShmKind : uint8_t {
  kBarrier,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kReduce,
  kAllReduce,
  kReduceScatter,
  kMessage
};

/// What a rank has called. All ranks of a group call the same, in the same order.
struct ShmCall {
  uint64_t sequence = 0;
  int64_t bytes = 0;  // of a rank's input
  int32_t root = -1;  // a rank of the group; of a message its tag
  ShmKind kind{};
  uint8_t reduces = 0;  // then these are known, too:
  uint8_t dtype = 0;
  uint8_t op = 0;

  bool operator==(const ShmCall&) const = default;
  /// "all_gather of 64 bytes"
  std::string text() const;
};

/// A chunk on its way; its bytes follow.
struct alignas(64) ShmChunk {
  std::atomic<uint64_t> stamp;  // its number in the ring + 1, written last
  ShmCall call;
  uint32_t last;  // of this rank's chunks for this call

  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};

/// Chunks that one rank writes, in turn.
struct ShmRing {
  std::byte* start = nullptr;
  uint64_t slots = 0;
  size_t capacity = 0;  // of a chunk, in bytes

  ShmChunk& chunk(uint64_t number) const {
    return *reinterpret_cast<ShmChunk*>(start + number % slots * (sizeof(ShmChunk) + capacity));
  }
  bool holds(uint64_t number) const {
    return chunk(number).stamp.load(std::memory_order_acquire) == number + 1;
  }
  size_t bytes() const { return slots * (sizeof(ShmChunk) + capacity); }
};

/// What wakes a rank: a counter that others raise when they did what it waits for.
struct ShmBell {
  Counter rings;
  alignas(64) std::atomic<uint64_t> wanted;  // 0: awake; else two ranks + 1, or kAnyone
  static constexpr uint64_t kAnyone = ~uint64_t{0};
};

/// Ranks of one group cannot share memory; the reason is the same text on all of them.
struct ShmRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ShmSegment {
 public:
  /// Blocks until all ranks have called it. ShmRefused on all of them if one of them cannot.
  static std::shared_ptr<ShmSegment> meet(const BackendOptions& options);

  const std::shared_ptr<Presence>& presence() const { return presence_; }
  int rank() const { return presence_->rank(); }
  int size() const { return presence_->size(); }

  ShmBell& bell(int rank) const;
  /// Wakes `rank` if it waits for something that this one did.
  void ring(int rank) const;
  /// What `rank` sends to all others in collectives.
  ShmRing to_all(int rank) const;
  /// How many chunks of `writer` the `reader` has done with.
  std::atomic<uint64_t>& read_of_all(int reader, int writer) const;
  /// Messages between two ranks, and how many chunks of them are done with.
  ShmRing to_one(int from, int to) const;
  std::atomic<uint64_t>& read_of_one(int from, int to) const;

  /// No rank can use the group any more. Returns why: what the first to say so has said.
  std::string break_up(const std::string& why) const;
  /// Whether one has said so.
  bool broken() const;

 private:
  struct Layout;
  struct Fate;
  ShmSegment(std::shared_ptr<SharedMemory> memory, const BackendOptions& options);

  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<Presence> presence_;
  std::shared_ptr<const Layout> layout_;
};

}  // namespace fsdp2::comm
