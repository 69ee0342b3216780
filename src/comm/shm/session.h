#pragma once

#include "comm/shm/engine.h"

#include <mutex>
#include <utility>

namespace fsdp2::comm {

/// The mutex. What is over is told, and let go, without it: both may run code of others.
class ShmEngine::Session {
 public:
  explicit Session(ShmEngine& engine) : engine_(engine), lock_(engine.mutex_) {}
  Session(ShmEngine& engine, std::try_to_lock_t how) : engine_(engine), lock_(engine.mutex_, how) {}
  ~Session() {
    if (!lock_) return;
    engine_.note_busy();
    const auto over = std::exchange(engine_.over_, {});
    // A thread that sleeps may wait for what is over, or need something else than before.
    const bool wake = moved && engine_.sleepers_ > 0;
    lock_.unlock();
    if (wake) engine_.segment_->bell(engine_.rank_).rings.raise();
    for (const auto& work : over) work->tell();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

  bool moved = false;

 private:
  ShmEngine& engine_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace fsdp2::comm
