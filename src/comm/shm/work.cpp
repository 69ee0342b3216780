#include "comm/shm/work.h"

#include "comm/shm/engine.h"
#include "comm/threads.h"
#include "comm/work.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

namespace fsdp2::comm {

ShmWork::ShmWork(std::shared_ptr<ShmEngine> engine, std::shared_ptr<ShmDriver> driver,
                 std::vector<at::Tensor> kept, size_t outputs)
    : engine_(std::move(engine)),
      driver_(std::move(driver)),
      kept_(std::move(kept)),
      outputs_(outputs) {}

bool ShmWork::isCompleted() {
  if (!over()) engine_->poll();
  return over();
}

bool ShmWork::isSuccess() const { return state_.load(std::memory_order_acquire) == State::kDone; }

std::exception_ptr ShmWork::error() const {
  return std::make_exception_ptr(PeerError({__func__, __FILE__, __LINE__}, error_));
}

std::exception_ptr ShmWork::exception() const {
  return state_.load(std::memory_order_acquire) == State::kFailed ? error() : nullptr;
}

bool ShmWork::wait(std::chrono::milliseconds limit) {
  if (!over()) engine_->wait(*this, limit > kNoTimeout ? limit : timeout);
  if (!isSuccess()) std::rethrow_exception(error());
  return true;
}

std::vector<at::Tensor> ShmWork::result() {
  return {kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(outputs_)};
}

void ShmWork::abort() { engine_->abort(); }

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  {
    const std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    future_ = new_tensors_future();
  }
  const auto future = future_;
  if (over()) {
    tell();
  } else {
    driver_->drive(c10::intrusive_ptr<ShmWork>::reclaim_copy(this));
  }
  return future;
}

void ShmWork::set_over(const std::string& error) {
  error_ = error;
  state_.store(error.empty() ? State::kDone : State::kFailed, std::memory_order_release);
}

void ShmWork::tell() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_ || std::exchange(told_, true)) return;
    future = future_;
  }
  if (isSuccess()) {
    future->markCompleted(c10::IValue(result()));
  } else {
    future->setError(error());
  }
}

struct ShmDriver::State {
  std::shared_ptr<ShmEngine> engine;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<ShmWork>> works;
  bool stopping = false;
  std::thread thread;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !works.empty(); });
      if (works.empty()) return;
      c10::intrusive_ptr<ShmWork> work = std::move(works.front());
      works.pop_front();
      lock.unlock();
      if (!work->over()) engine->wait(*work, work->timeout);
      work->tell();
      work.reset();
      lock.lock();
    }
  }
};

ShmDriver::ShmDriver(std::shared_ptr<ShmEngine> engine) : state_(std::make_shared<State>()) {
  state_->engine = std::move(engine);
}

ShmDriver::~ShmDriver() { stop(); }

void ShmDriver::drive(c10::intrusive_ptr<ShmWork> work) {
  const std::lock_guard lock(state_->mutex);
  state_->works.push_back(std::move(work));
  if (!state_->thread.joinable() && !state_->stopping)
    state_->thread = std::thread([state = state_] { state->run(); });
  state_->changed.notify_one();
}

void ShmDriver::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_one();
    thread = std::move(state_->thread);
  }
  let_end(std::move(thread));
}

}  // namespace fsdp2::comm
