#include "comm/hosts/queue.h"

#include "comm/rendezvous.h"
#include "comm/threads.h"
#include "comm/work.h"

#include <utility>

namespace fsdp2::comm {
namespace {

std::exception_ptr queue_error(const std::string& text) {
  return std::make_exception_ptr(PeerError({__func__, __FILE__, __LINE__}, text));
}

}  // namespace

HostsWork::HostsWork(std::shared_ptr<HostsQueue> queue, HostsCall call,
                     std::vector<at::Tensor> results, std::function<void(const HostsCall&)> run)
    : queue_(std::move(queue)),
      call_(std::move(call)),
      results_(std::move(results)),
      run_(std::move(run)) {}

bool HostsWork::wait(std::chrono::milliseconds limit) {
  if (limit > kNoTimeout) {
    std::unique_lock lock(mutex_);
    const bool in_time = cv_.wait_for(lock, limit, [&] { return completed_; });
    lock.unlock();
    if (!in_time) {
      queue_->fail(c10::str("rank ", call_.rank, " timed out: ", call_.text(),
                            " was not over after ", duration_text(limit)));
    }
  }
  return Work::wait(kNoTimeout);
}

bool HostsWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

void HostsWork::abort() {
  queue_->fail(c10::str("rank ", call_.rank, " has aborted ", call_.text()));
}

c10::intrusive_ptr<c10::ivalue::Future> HostsWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = new_tensors_future();
    future = future_;
  }
  tell();
  return future;
}

void HostsWork::end(const std::string& error) {
  run_ = nullptr;
  finish(error.empty() ? nullptr : queue_error(error));
  tell();
}

void HostsWork::tell() {
  {
    const std::lock_guard lock(mutex_);
    if (!completed_ || !future_ || std::exchange(told_, true)) return;
  }
  if (exception_) {
    future_->setError(exception_);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

HostsQueue::HostsQueue(std::function<std::string(const std::string&)> break_up,
                       std::function<void()> clean_up)
    : break_up_(std::move(break_up)), clean_up_(std::move(clean_up)) {}

void HostsQueue::start(c10::intrusive_ptr<HostsWork> work) {
  const std::lock_guard lock(mutex_);
  if (!broken_.empty()) std::rethrow_exception(queue_error(broken_));
  if (stopping_) std::rethrow_exception(queue_error("the group was left"));
  work->call_.number = started_++;
  works_.push_back(std::move(work));
  wake();
}

void HostsQueue::wake() {
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
  changed_.notify_one();
}

uint64_t HostsQueue::started() {
  const std::lock_guard lock(mutex_);
  return started_;
}

void HostsQueue::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return works_.empty() && !running_; });
}

void HostsQueue::fail(const std::string& why) {
  const std::string first = break_up_(why);
  const std::lock_guard lock(mutex_);
  if (!broken_.empty()) return;
  broken_ = first;
  if (!stopping_) wake();
}

std::string HostsQueue::attempt(HostsWork& work) {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) return broken_;
    }
    work.call_.deadline = std::chrono::steady_clock::now() + work.call_.timeout;
    work.run_(work.call_);
    return {};
  } catch (const std::exception& error) {
    fail(plain_message(error));
  }
  const std::lock_guard lock(mutex_);
  return broken_;
}

void HostsQueue::run() {
  bool clean = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock,
                  [&] { return stopping_ || !works_.empty() || (clean && !broken_.empty()); });
    if (works_.empty()) {
      if (broken_.empty() || !std::exchange(clean, false)) return;
      lock.unlock();
      clean_up_();
      lock.lock();
      continue;
    }
    c10::intrusive_ptr<HostsWork> work = std::move(works_.front());
    works_.pop_front();
    running_ = true;
    lock.unlock();
    work->end(attempt(*work));
    work.reset();
    lock.lock();
    running_ = false;
    if (works_.empty()) idle_.notify_all();
  }
}

void HostsQueue::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
    thread = std::move(thread_);
  }
  let_end(std::move(thread));
}

}  // namespace fsdp2::comm
