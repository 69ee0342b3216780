#pragma once

// Memory that ranks of one host map together, and counters in it that they wait for.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fsdp2::comm {

/// Whether this process may share memory with others: not with FSDP2_SHARED_MEMORY=off in its
/// environment. Error if that is neither 'on' nor 'off'.
bool may_share_memory();

/// Processes with equal texts can and may share memory: one kernel, one space of process ids, one
/// network. So containers and network namespaces count as hosts of their own.
std::string host_identity();
/// Whether an identity is that of a process which may not share memory with others.
bool is_alone(const std::string& host_identity);

constexpr size_t kPageBytes = 4096;
constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/// An anonymous file (memfd) that is mapped whole. Nothing of it is left when the last process that
/// has it ends, however it ends.
class SharedMemory {
 public:
  /// New, all zeros. `name` is what /proc/<pid>/maps shows.
  static std::shared_ptr<SharedMemory> create(size_t bytes, const std::string& name);
  /// What another process created, by its ticket(). That process must keep it until then.
  static std::shared_ptr<SharedMemory> open(const std::string& ticket);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::string ticket() const;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int file() const { return file_; }

 private:
  SharedMemory(int file, size_t bytes);

  int file_;
  size_t size_;
  std::byte* data_ = nullptr;
};

/// A number in shared memory that one rank raises and others wait for. Zero bytes are a valid one.
struct alignas(64) Counter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;

  uint64_t get() const { return value.load(std::memory_order_acquire); }
  /// What was written to memory before is seen by whoever sees the number.
  void set(uint64_t to);
  /// set(get() + 1), by any number of ranks at a time.
  void raise();
  /// Whether it is at least `least` now, or comes to be while this looks for `spin` and then sleeps
  /// for `sleep` at most.
  bool await(uint64_t least, std::chrono::nanoseconds spin, std::chrono::milliseconds sleep);
};

/// Sleeps until one of `counters` differs from the number of `seen` beside it, for `sleep` at most.
void await_any(std::span<Counter* const> counters, std::span<const uint64_t> seen,
               std::chrono::milliseconds sleep);

/// Lets a hyperthread's sibling run while this one looks again and again.
void relax();

/// The ranks of a group that share memory: who is alive. Thread-safe.
class Presence {
 public:
  /// Bytes that it needs at the start of a memory.
  static size_t bytes(int ranks);

  /// This rank is present in `memory` from here on. `ranks` are the world's, `rank` is the position
  /// in it.
  Presence(std::shared_ptr<SharedMemory> memory, int rank, std::vector<int> ranks, std::string name,
           std::chrono::milliseconds timeout);
  /// It has left.
  ~Presence();
  void leave() const;
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  int rank() const { return rank_; }
  /// Its number in the world.
  int global_rank(int member) const { return ranks_[static_cast<size_t>(member)]; }
  const std::string& name() const { return name_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// How long to look for what is about to come before sleeping: not at all where ranks outnumber
  /// cores.
  std::chrono::nanoseconds spin() const { return spin_; }

  /// "rank 3 (process 17)"
  std::string who(int member) const;
  /// Why that member can do nothing more: it "has died" or "has left"; empty if it is there.
  const char* gone(int member) const;
  /// Error if it has died or left: "rank 3 (process 17) has died".
  void check(int member) const;
  /// The error of having waited too long for it.
  [[noreturn]] void fail_late(int member, std::chrono::milliseconds waited) const;
  /// Blocks until `counter`, which `member` raises, is at least `least`. Both errors above.
  void wait(Counter& counter, uint64_t least, int member) const;

 private:
  struct Member;
  Member& member(int rank) const;

  const std::shared_ptr<SharedMemory> memory_;
  const int rank_;
  const std::vector<int> ranks_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  std::chrono::nanoseconds spin_{};
};

}  // namespace fsdp2::comm
