#pragma once

// Messages between two ranks of backend "shm": a ring for each direction of each pair. What comes
// with another tag than is waited for is kept.

#include "comm/shm/work.h"

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

namespace fsdp2::comm {

class ShmMessage final : public ShmWork {
 public:
  using ShmWork::ShmWork;
  int sourceRank() const override { return peer; }

  bool sends = false;
  int peer = -1;  // of a receiver: -1 is any, until a message comes
  std::byte* data = nullptr;
  int64_t moved = 0;  // bytes
};

/// The engine calls with its mutex held.
class ShmMessages {
 public:
  explicit ShmMessages(const ShmSegment& segment);

  using Over = c10::SmallVector<c10::intrusive_ptr<ShmWork>, 4>;
  void start(c10::intrusive_ptr<ShmMessage> message, Over& over);
  /// Moves what can be moved; adds what is over. Returns whether anything was.
  bool progress(Over& over);
  bool idle() const { return open_sends_ + open_receives_ == 0 && receivers_.empty(); }
  /// All that is open, which is forgotten.
  Over drop();
  /// Adds the ranks that open messages need something of. Returns whether one of them may do.
  bool add_wanted(std::vector<int>& ranks) const;

 private:
  struct Stored {
    ShmCall call;
    std::vector<std::byte> bytes;
  };
  struct Outbox {
    ShmRing ring;
    uint64_t written = 0;
    std::deque<c10::intrusive_ptr<ShmMessage>> open;
  };
  struct Inbox {
    ShmRing ring;
    uint64_t read = 0;
    bool within = false;                      // a message
    c10::intrusive_ptr<ShmMessage> receiver;  // of that; null: it goes to `stored`
    int64_t moved = 0;
    std::deque<Stored> stored;  // the last may still be coming
  };

  bool write(int to, Over& over);
  bool read(int from, Over& over);
  bool awaited(int from) const;
  /// Takes the first receiver that asked for it.
  c10::intrusive_ptr<ShmMessage> take_receiver(int from, const ShmCall& call);
  void check_size(int from, const ShmCall& sent, const ShmMessage& receiver) const;
  void deliver(int from, const Stored& stored, ShmMessage& receiver) const;
  void done_with(int from);

  const ShmSegment& segment_;
  std::vector<Outbox> outboxes_;
  std::vector<Inbox> inboxes_;
  std::deque<c10::intrusive_ptr<ShmMessage>> receivers_;  // that have got nothing yet
  int open_sends_ = 0;
  int open_receives_ = 0;  // that a message is coming into
};

}  // namespace fsdp2::comm
