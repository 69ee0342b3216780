#include "comm/shm/messages.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp2::comm {

ShmMessages::ShmMessages(const ShmSegment& segment)
    : segment_(segment),
      outboxes_(static_cast<size_t>(segment.size())),
      inboxes_(static_cast<size_t>(segment.size())) {
  for (int other = 0; other < segment.size(); ++other) {
    if (other == segment.rank()) continue;
    outboxes_[static_cast<size_t>(other)].ring = segment.to_one(segment.rank(), other);
    inboxes_[static_cast<size_t>(other)].ring = segment.to_one(other, segment.rank());
  }
}

void ShmMessages::start(c10::intrusive_ptr<ShmMessage> message, Over& over) {
  if (message->sends) {
    const int to = message->peer;
    outboxes_[static_cast<size_t>(to)].open.push_back(std::move(message));
    ++open_sends_;
    while (write(to, over)) {
    }
    return;
  }
  for (int from = 0; from < segment_.size(); ++from) {
    if (message->peer >= 0 && message->peer != from) continue;
    Inbox& inbox = inboxes_[static_cast<size_t>(from)];
    for (auto stored = inbox.stored.begin(); stored != inbox.stored.end(); ++stored) {
      const bool coming = inbox.within && !inbox.receiver && stored + 1 == inbox.stored.end();
      if (coming || stored->call.root != message->call.root) continue;
      deliver(from, *stored, *message);
      inbox.stored.erase(stored);
      over.push_back(std::move(message));
      return;
    }
  }
  receivers_.push_back(std::move(message));
}

bool ShmMessages::progress(Over& over) {
  bool moved = false;
  for (int other = 0; other < segment_.size(); ++other) {
    if (other == segment_.rank()) continue;
    if (open_sends_ > 0 && write(other, over)) moved = true;
    if (!idle() && read(other, over)) moved = true;
  }
  return moved;
}

bool ShmMessages::write(int to, Over& over) {
  Outbox& box = outboxes_[static_cast<size_t>(to)];
  if (box.open.empty()) return false;
  const uint64_t read = segment_.read_of_one(segment_.rank(), to).load(std::memory_order_acquire);
  if (box.written - read >= box.ring.slots) return false;
  ShmMessage& message = *box.open.front();
  ShmChunk& chunk = box.ring.chunk(box.written);
  const int64_t left = message.call.bytes - message.moved;
  const auto now = std::min(left, static_cast<int64_t>(box.ring.capacity));
  if (now > 0) std::memcpy(chunk.data(), message.data + message.moved, static_cast<size_t>(now));
  message.moved += now;
  chunk.call = message.call;
  chunk.last = now == left ? 1 : 0;
  chunk.stamp.store(++box.written, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  segment_.ring(to);
  if (now == left) {
    --open_sends_;
    over.push_back(std::move(box.open.front()));
    box.open.pop_front();
  }
  return true;
}

bool ShmMessages::read(int from, Over& over) {
  Inbox& box = inboxes_[static_cast<size_t>(from)];
  if (!box.ring.holds(box.read)) return false;
  ShmChunk& chunk = box.ring.chunk(box.read);
  if (!box.within) {
    box.receiver = take_receiver(from, chunk.call);
    // What nobody waits for stays where it is, so that its sender waits.
    if (!box.receiver && !awaited(from)) return false;
    box.within = true;
    box.moved = 0;
    if (box.receiver) {
      ++open_receives_;
      check_size(from, chunk.call, *box.receiver);
      box.receiver->peer = from;
    } else {
      box.stored.push_back(
          {chunk.call, std::vector<std::byte>(static_cast<size_t>(chunk.call.bytes))});
    }
  }
  std::byte* to = box.receiver ? box.receiver->data : box.stored.back().bytes.data();
  const auto now = std::min(chunk.call.bytes - box.moved, static_cast<int64_t>(box.ring.capacity));
  if (now > 0) std::memcpy(to + box.moved, chunk.data(), static_cast<size_t>(now));
  box.moved += now;
  const bool last = chunk.last != 0;
  done_with(from);
  if (!last) return true;
  box.within = false;
  if (box.receiver) {
    --open_receives_;
    over.push_back(std::move(box.receiver));
    box.receiver.reset();
  } else if (auto receiver = take_receiver(from, box.stored.back().call)) {
    deliver(from, box.stored.back(), *receiver);
    box.stored.pop_back();
    over.push_back(std::move(receiver));
  }
  return true;
}

void ShmMessages::done_with(int from) {
  Inbox& box = inboxes_[static_cast<size_t>(from)];
  segment_.read_of_one(from, segment_.rank()).store(++box.read, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  segment_.ring(from);
}

bool ShmMessages::awaited(int from) const {
  return std::any_of(receivers_.begin(), receivers_.end(), [from](const auto& receiver) {
    return receiver->peer < 0 || receiver->peer == from;
  });
}

c10::intrusive_ptr<ShmMessage> ShmMessages::take_receiver(int from, const ShmCall& call) {
  const auto found = std::find_if(receivers_.begin(), receivers_.end(), [&](const auto& receiver) {
    return (receiver->peer < 0 || receiver->peer == from) && receiver->call.root == call.root;
  });
  if (found == receivers_.end()) return {};
  c10::intrusive_ptr<ShmMessage> receiver = std::move(*found);
  receivers_.erase(found);
  return receiver;
}

void ShmMessages::check_size(int from, const ShmCall& sent, const ShmMessage& receiver) const {
  const Presence& who = *segment_.presence();
  TORCH_CHECK(sent.bytes == receiver.call.bytes, "rank ", who.global_rank(from), " sent a ",
              sent.text(), " to rank ", who.global_rank(segment_.rank()), ", which expects ",
              receiver.call.bytes, " bytes");
}

void ShmMessages::deliver(int from, const Stored& stored, ShmMessage& receiver) const {
  check_size(from, stored.call, receiver);
  receiver.peer = from;
  if (!stored.bytes.empty()) std::memcpy(receiver.data, stored.bytes.data(), stored.bytes.size());
}

ShmMessages::Over ShmMessages::drop() {
  Over open;
  for (Outbox& box : outboxes_) {
    for (auto& message : box.open) open.push_back(std::move(message));
    box.open.clear();
  }
  for (Inbox& box : inboxes_) {
    if (box.receiver) open.push_back(std::move(box.receiver));
    box = {};
  }
  for (auto& receiver : receivers_) open.push_back(std::move(receiver));
  receivers_.clear();
  open_sends_ = open_receives_ = 0;
  return open;
}

bool ShmMessages::add_wanted(std::vector<int>& ranks) const {
  bool anyone = false;
  for (int other = 0; other < segment_.size(); ++other) {
    const auto at = static_cast<size_t>(other);
    if (!outboxes_[at].open.empty() || inboxes_[at].receiver) ranks.push_back(other);
  }
  for (const auto& receiver : receivers_) {
    if (receiver->peer >= 0) {
      ranks.push_back(receiver->peer);
    } else {
      anyone = true;
    }
  }
  return anyone;
}

}  // namespace fsdp2::comm
