#pragma once

// The works of one group of backend "shm" and what moves them. There is no thread: whoever waits
// for one of the works moves all of them, and those of the process's other groups.

#include "comm/shm/messages.h"
#include "comm/shm/segment.h"
#include "comm/shm/work.h"

#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace fsdp2::comm {

class ShmEngine : public std::enable_shared_from_this<ShmEngine> {
 public:
  static std::shared_ptr<ShmEngine> make(std::shared_ptr<ShmSegment> segment,
                                         std::chrono::milliseconds timeout);
  /// Fails what is unfinished; this rank has left the group.
  void close();

  const ShmSegment& segment() const { return *segment_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  uint64_t sequence();

  /// Does what can be done at once; the rest is done by waits, polls and later starts. Error if the
  /// group is broken.
  void start(c10::intrusive_ptr<ShmCollective> work);
  void start_message(c10::intrusive_ptr<ShmMessage> work);
  /// Does what can be done now. Returns whether anything was.
  bool poll();
  /// Blocks until the work is over. When `timeout` has passed the group is broken.
  void wait(ShmWork& work, std::chrono::milliseconds timeout);
  /// Breaks the group.
  void abort();
  /// The same for a reason. Returns why it is broken: what the first rank to break it has said.
  std::string break_up(const std::string& why);

 private:
  class Session;
  /// What the next steps need something of.
  struct Wanted {
    std::vector<int> ranks;
    bool any_will_do = false;  // a message from anyone
    uint64_t word = 0;         // for ShmBell
  };

  ShmEngine(std::shared_ptr<ShmSegment> segment, std::chrono::milliseconds timeout);

  // The rest needs the mutex.
  bool progress();
  bool send_chunk();
  bool read_chunks();
  bool read_together(ShmCollective& work);
  bool read_from_each(ShmCollective& work);
  bool has_chunk(ShmCollective& work, int peer);
  void finish_chunk(ShmCollective& work, int peer, bool last);
  bool has_room();
  void ring_all() const;
  void check_usable();
  void fail(const std::string& why);
  void fail_all(const std::string& why);
  void note_busy();
  Wanted wanted();

  // Without it.
  bool help_others();
  void sleep(const ShmWork& work, std::chrono::milliseconds at_most);
  void check_alive(const ShmWork& work);
  void fail_late(const ShmWork& work, std::chrono::milliseconds waited);
  /// Tells others to ring, unless there is something to do at once. `seen` is for await_any.
  bool lie_down(uint64_t& seen);
  void get_up();

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_, size_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_;
  std::string broken_;  // why no work can be started any more
  std::deque<c10::intrusive_ptr<ShmCollective>> queue_;
  size_t sent_works_ = 0;  // of those in the queue: all chunks are in the ring
  uint64_t next_sequence_ = 0;
  ShmRing own_;
  uint64_t written_ = 0;    // chunks of this rank so far
  uint64_t seen_read_ = 0;  // chunks that all others have done with, when this looked last
  int slowest_ = 0;         // who had done with the least then
  std::vector<ShmRing> rings_;
  std::vector<uint64_t> read_;              // chunks of each rank so far
  std::vector<const std::byte*> together_;  // chunks, by rank
  ShmMessages messages_;
  c10::SmallVector<c10::intrusive_ptr<ShmWork>, 4> over_;  // let go without the mutex
  int sleepers_ = 0;
  std::atomic<bool> busy_ = false;  // has unfinished works
};

}  // namespace fsdp2::comm
