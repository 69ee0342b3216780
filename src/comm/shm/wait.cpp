// Waiting in a group of backend "shm": looking for a while, then sleeping, and who is to blame.

#include "comm/rendezvous.h"
#include "comm/shm/engine.h"
#include "comm/shm/registry.h"
#include "comm/shm/session.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace fsdp2::comm {
namespace {

using WaitClock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kSlice{50};

}  // namespace

void ShmEngine::wait(ShmWork& work, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) timeout = timeout_;
  const std::chrono::nanoseconds spin = segment_->presence()->spin();
  const auto started = WaitClock::now();
  auto last_move = started, last_check = started;
  for (;;) {
    bool moved = poll();
    if (work.over()) return;
    if (help_others()) moved = true;
    const auto now = WaitClock::now();
    if (moved) last_move = now;
    if (now - last_move < spin) {
      relax();
      continue;
    }
    if (now - last_check >= kSlice) {
      check_alive(work);
      last_check = now;
    }
    if (now - started >= timeout) {
      fail_late(work, timeout);
      return;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(started + timeout - now);
    sleep(work, std::min(kSlice, left));
  }
}

bool ShmEngine::help_others() {
  if (shm_registry::busy() <= (busy_ ? 1 : 0)) return false;
  bool moved = false;
  for (const auto& other : shm_registry::others(*this)) {
    if (!other->busy_) continue;
    Session session(*other, std::try_to_lock);
    if (session) session.moved = other->progress();
    if (session && session.moved) moved = true;
  }
  return moved;
}

bool ShmEngine::lie_down(uint64_t& seen) {
  Session session(*this);
  ShmBell& bell = segment_->bell(rank_);
  bell.wanted.store(wanted().word, std::memory_order_seq_cst);
  seen = bell.rings.get();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // What came before others could see that this sleeps.
  session.moved = progress();
  if (session.moved) {
    if (sleepers_ == 0) bell.wanted.store(0, std::memory_order_relaxed);
    return false;
  }
  ++sleepers_;
  return true;
}

void ShmEngine::get_up() {
  const std::lock_guard lock(mutex_);
  if (--sleepers_ == 0) segment_->bell(rank_).wanted.store(0, std::memory_order_relaxed);
}

void ShmEngine::sleep(const ShmWork& work, std::chrono::milliseconds at_most) {
  std::vector<std::shared_ptr<ShmEngine>> all = {shared_from_this()};
  if (shm_registry::busy() > (busy_ ? 1 : 0)) {
    for (auto& other : shm_registry::others(*this)) {
      if (other->busy_) all.push_back(std::move(other));
    }
  }
  std::vector<Counter*> bells;
  std::vector<uint64_t> seen;
  size_t down = 0;
  for (; down < all.size(); ++down) {
    bells.push_back(&all[down]->segment_->bell(all[down]->rank_).rings);
    seen.push_back(0);
    if (!all[down]->lie_down(seen.back())) break;
  }
  if (down == all.size() && !work.over()) await_any(bells, seen, at_most);
  for (size_t i = 0; i < down; ++i) all[i]->get_up();
}

ShmEngine::Wanted ShmEngine::wanted() {
  Wanted wanted;
  bool anyone = false;
  if (!queue_.empty()) {
    ShmCollective& work = *queue_.front();
    for (int peer = 0; peer < size_; ++peer) {
      const auto at = static_cast<size_t>(peer);
      if (peer == rank_ || work.incoming[at].finished || rings_[at].holds(read_[at])) continue;
      wanted.ranks.push_back(peer);
    }
    // Chunks that are read together have to wait for all ranks, in any order; others may be read,
    // and have to be, as long as their senders have room for more.
    if (!work.together && wanted.ranks.size() > 1) anyone = true;
  }
  const size_t to_read = wanted.ranks.size();
  if (sent_works_ < queue_.size() && queue_[sent_works_]->can_write(queue_[sent_works_]->sent) &&
      !has_room()) {
    wanted.ranks.push_back(slowest_);
  }
  if (!messages_.idle()) {
    wanted.any_will_do = messages_.add_wanted(wanted.ranks);
    anyone = true;
  }
  const auto code = [&](size_t i) { return static_cast<uint64_t>(wanted.ranks[i]) + 1; };
  if (anyone) {
    wanted.word = ShmBell::kAnyone;
  } else {
    if (to_read > 0) wanted.word = code(0);
    if (wanted.ranks.size() > to_read) wanted.word += code(to_read) << 32U;
  }
  return wanted;
}

void ShmEngine::check_alive(const ShmWork& work) {
  Session session(*this);
  const Presence& who = *segment_->presence();
  const Wanted needed = wanted();
  std::string gone;
  for (const int rank : needed.ranks) {
    if (gone.empty() && *who.gone(rank) != '\0') gone = who.who(rank) + ' ' + who.gone(rank);
  }
  if (gone.empty() && needed.any_will_do) {
    int missing = 0;
    std::string last;
    for (int other = 0; other < size_; ++other) {
      const std::string how = other == rank_ ? "" : who.gone(other);
      if (how.empty()) continue;
      ++missing;
      last = who.who(other) + ' ' + how;
      if (how == "has died") gone = last;
    }
    if (missing == size_ - 1) gone = last;
  }
  if (gone.empty()) return;
  // What it has done before counts.
  session.moved = progress();
  if (session.moved || work.over()) return;
  session.moved = true;
  fail(c10::str(gone, ": rank ", who.global_rank(rank_), " waited for it in ", work.call.text(),
                " of group '", who.name(), "'"));
}

void ShmEngine::fail_late(const ShmWork& work, std::chrono::milliseconds waited) {
  Session session(*this);
  session.moved = progress();
  if (work.over()) return;
  const Presence& who = *segment_->presence();
  std::vector<int> ranks = wanted().ranks;
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::vector<std::string> late;
  late.reserve(ranks.size());
  for (const int rank : ranks) late.push_back(who.who(rank));
  session.moved = true;
  fail(c10::str("rank ", who.global_rank(rank_), " timed out: it waited ", duration_text(waited),
                " for ", late.empty() ? "any rank" : c10::Join(", ", late), " in ",
                work.call.text(), " of group '", who.name(),
                "'; running, but not there: not called, or too slow"));
}

}  // namespace fsdp2::comm
