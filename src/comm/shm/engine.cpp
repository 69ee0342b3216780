#include "comm/shm/engine.h"

#include "comm/rendezvous.h"
#include "comm/shm/registry.h"
#include "comm/shm/session.h"
#include "comm/work.h"

#include <c10/util/StringUtil.h>

namespace fsdp2::comm {
namespace {

void throw_peer_error(const std::string& text) {
  throw PeerError({__func__, __FILE__, __LINE__}, text);
}

}  // namespace

ShmEngine::ShmEngine(std::shared_ptr<ShmSegment> segment, std::chrono::milliseconds timeout)
    : segment_(std::move(segment)),
      rank_(segment_->rank()),
      size_(segment_->size()),
      timeout_(timeout),
      own_(segment_->to_all(rank_)),
      read_(static_cast<size_t>(size_), 0),
      together_(static_cast<size_t>(size_), nullptr),
      messages_(*segment_) {
  rings_.reserve(static_cast<size_t>(size_));
  for (int rank = 0; rank < size_; ++rank) rings_.push_back(segment_->to_all(rank));
}

std::shared_ptr<ShmEngine> ShmEngine::make(std::shared_ptr<ShmSegment> segment,
                                           std::chrono::milliseconds timeout) {
  std::shared_ptr<ShmEngine> engine(new ShmEngine(std::move(segment), timeout));
  shm_registry::add(engine);
  return engine;
}

void ShmEngine::close() {
  Session session(*this);
  if (broken_.empty()) {
    fail_all(c10::str("group '", segment_->presence()->name(), "' was left by rank ",
                      segment_->presence()->global_rank(rank_)));
  }
  session.moved = true;
  segment_->presence()->leave();
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

uint64_t ShmEngine::sequence() {
  const std::lock_guard lock(mutex_);
  return next_sequence_;
}

void ShmEngine::check_usable() {
  if (broken_.empty() && segment_->broken()) fail_all(segment_->break_up({}));
  if (!broken_.empty()) throw_peer_error(broken_);
}

void ShmEngine::start(c10::intrusive_ptr<ShmCollective> work) {
  Session session(*this);
  check_usable();
  work->call.sequence = next_sequence_++;
  work->incoming.resize(static_cast<size_t>(size_));
  work->unfinished = size_ - 1;
  queue_.push_back(std::move(work));
  session.moved = true;
  if (size_ == 1) {
    progress();
  } else {
    try {
      while (send_chunk()) {
      }
    } catch (const std::exception& error) {
      fail(plain_message(error));
    }
  }
}

void ShmEngine::start_message(c10::intrusive_ptr<ShmMessage> work) {
  Session session(*this);
  check_usable();
  session.moved = true;
  const size_t before = over_.size();
  try {
    messages_.start(std::move(work), over_);
  } catch (const std::exception& error) {
    fail(plain_message(error));
  }
  for (size_t i = before; i < over_.size(); ++i) {
    if (!over_[i]->over()) over_[i]->set_over({});
  }
}

bool ShmEngine::poll() {
  Session session(*this);
  session.moved = progress();
  return session.moved;
}

void ShmEngine::abort() {
  break_up(c10::str(segment_->presence()->who(rank_), " has aborted group '",
                    segment_->presence()->name(), "'"));
}

std::string ShmEngine::break_up(const std::string& why) {
  Session session(*this);
  session.moved = true;
  if (broken_.empty()) fail(why);
  return broken_;
}

bool ShmEngine::progress() {
  if (queue_.empty() && messages_.idle()) return false;
  bool any = false;
  try {
    for (bool moved = true; moved; any = any || moved) {
      moved = send_chunk();
      if (read_chunks()) moved = true;
      if (!messages_.idle()) {
        const size_t before = over_.size();
        if (messages_.progress(over_)) moved = true;
        for (size_t i = before; i < over_.size(); ++i) over_[i]->set_over({});
      }
    }
  } catch (const std::exception& error) {
    fail(plain_message(error));
    return true;
  }
  if (!any && segment_->broken()) {
    fail_all(segment_->break_up({}));
    return true;
  }
  return any;
}

bool ShmEngine::has_room() {
  if (written_ - seen_read_ < own_.slots) return true;
  uint64_t least = written_;
  for (int other = 0; other < size_; ++other) {
    if (other == rank_) continue;
    const uint64_t read = segment_->read_of_all(other, rank_).load(std::memory_order_acquire);
    if (read >= least) continue;
    least = read;
    slowest_ = other;
  }
  seen_read_ = least;
  return written_ - seen_read_ < own_.slots;
}

bool ShmEngine::send_chunk() {
  if (sent_works_ == queue_.size()) return false;
  ShmCollective& work = *queue_[sent_works_];
  if (!work.can_write(work.sent) || !has_room()) return false;
  ShmChunk& chunk = own_.chunk(written_);
  const bool last = work.write(work.sent, chunk.data());
  chunk.call = work.call;
  chunk.last = last ? 1 : 0;
  chunk.stamp.store(++written_, std::memory_order_release);
  ++work.sent;
  if (last) {
    work.all_sent = true;
    ++sent_works_;
  }
  ring_all();
  return true;
}

void ShmEngine::ring_all() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int other = 0; other < size_; ++other) {
    if (other != rank_) segment_->ring(other);
  }
}

bool ShmEngine::read_chunks() {
  if (queue_.empty()) return false;
  ShmCollective& work = *queue_.front();
  const bool moved = work.together ? read_together(work) : read_from_each(work);
  if (work.unfinished > 0 || !work.all_sent) return moved;
  work.set_over({});
  over_.push_back(std::move(queue_.front()));
  queue_.pop_front();
  --sent_works_;
  return true;
}

bool ShmEngine::has_chunk(ShmCollective& work, int peer) {
  const uint64_t number = read_[static_cast<size_t>(peer)];
  const ShmRing& ring = rings_[static_cast<size_t>(peer)];
  if (!ring.holds(number)) return false;
  const ShmCall& theirs = ring.chunk(number).call;
  if (theirs == work.call) return true;
  const Presence& who = *segment_->presence();
  const bool first = rank_ < peer;
  const ShmCall& low = first ? work.call : theirs;
  const ShmCall& high = first ? theirs : work.call;
  const int low_rank = first ? rank_ : peer, high_rank = first ? peer : rank_;
  throw_peer_error(
      c10::str("ranks called different collectives in group '", who.name(), "': rank ",
               who.global_rank(high_rank), " called ", high.text(), " where rank ",
               who.global_rank(low_rank), " called ", low.text(), " (call ", low.sequence,
               high.sequence == low.sequence ? std::string() : c10::str(" and ", high.sequence),
               " of the group)"));
  return false;
}

void ShmEngine::finish_chunk(ShmCollective& work, int peer, bool last) {
  const auto at = static_cast<size_t>(peer);
  segment_->read_of_all(rank_, peer).store(++read_[at], std::memory_order_release);
  ++work.incoming[at].read;
  if (!last) return;
  work.incoming[at].finished = true;
  --work.unfinished;
}

bool ShmEngine::read_together(ShmCollective& work) {
  if (work.unfinished == 0) return false;
  bool all = true, last = false;
  uint32_t index = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (!has_chunk(work, peer)) {
      all = false;
      continue;
    }
    ShmChunk& chunk = rings_[static_cast<size_t>(peer)].chunk(read_[static_cast<size_t>(peer)]);
    together_[static_cast<size_t>(peer)] = chunk.data();
    last = chunk.last != 0;
    index = work.incoming[static_cast<size_t>(peer)].read;
  }
  // The own part must have left, as the result may take its place.
  if (!all || index >= work.sent) return false;
  together_[static_cast<size_t>(rank_)] = nullptr;
  work.read_all(index, together_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) finish_chunk(work, peer, last);
  }
  ring_all();
  return true;
}

bool ShmEngine::read_from_each(ShmCollective& work) {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (peer == rank_ || work.incoming[at].finished || !has_chunk(work, peer)) continue;
    ShmChunk& chunk = rings_[at].chunk(read_[at]);
    const bool last = chunk.last != 0;
    work.read(peer, work.incoming[at].read, chunk.data(), last);
    finish_chunk(work, peer, last);
    moved = true;
  }
  if (moved) ring_all();
  return moved;
}

void ShmEngine::fail(const std::string& why) { fail_all(segment_->break_up(why)); }

void ShmEngine::fail_all(const std::string& why) {
  broken_ = why;
  for (auto& work : over_) {
    if (!work->over()) work->set_over(why);
  }
  for (auto& work : queue_) over_.push_back(std::move(work));
  for (auto& work : messages_.drop()) over_.push_back(std::move(work));
  queue_.clear();
  sent_works_ = 0;
  for (auto& work : over_) {
    if (!work->over()) work->set_over(why);
  }
}

void ShmEngine::note_busy() {
  const bool busy = !queue_.empty() || !messages_.idle();
  if (busy == busy_.load(std::memory_order_relaxed)) return;
  busy_.store(busy);
  shm_registry::count_busy(busy ? 1 : -1);
}

}  // namespace fsdp2::comm
