#pragma once

// The collectives of one group of backend "hosts" that are on their way. A thread does them one
// after the other, in the order in which they were started, which is the same on all ranks: so they
// may be waited for in any order, or not at all.

#include "comm/hosts/network.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fsdp2::comm {

class HostsQueue;

class HostsWork final : public c10d::Work {
 public:
  /// `run` is for the queue's thread.
  HostsWork(std::shared_ptr<HostsQueue> queue, HostsCall call, std::vector<at::Tensor> results,
            std::function<void(const HostsCall&)> run);

  /// With a timeout that passes, the group is broken.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isSuccess() const override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call_.number; }
  void abort() override;

 private:
  friend class HostsQueue;
  /// All went well if `error` is empty.
  void end(const std::string& error);
  /// Tells who has asked for a future, once.
  void tell();

  const std::shared_ptr<HostsQueue> queue_;
  HostsCall call_;
  const std::vector<at::Tensor> results_;
  std::function<void(const HostsCall&)> run_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool told_ = false;
};

class HostsQueue : public std::enable_shared_from_this<HostsQueue> {
 public:
  /// `break_up`, on any thread, ends the work that is being done and returns why; `clean_up` runs
  /// once, on the queue's, after all works have been told.
  HostsQueue(std::function<std::string(const std::string&)> break_up,
             std::function<void()> clean_up);

  /// Error if the group is broken.
  void start(c10::intrusive_ptr<HostsWork> work);
  uint64_t started();
  /// Waits for all that were started.
  void drain();
  /// Fails all works, and later ones.
  void fail(const std::string& why);
  /// Drains, and ends the thread. Nothing can be started any more.
  void stop();

 private:
  void wake();  // needs the mutex
  void run();
  /// Does the work; returns why it failed.
  std::string attempt(HostsWork& work);

  const std::function<std::string(const std::string&)> break_up_;
  const std::function<void()> clean_up_;
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<c10::intrusive_ptr<HostsWork>> works_;
  bool running_ = false;
  bool stopping_ = false;
  std::string broken_;
  uint64_t started_ = 0;
  std::thread thread_;
};

}  // namespace fsdp2::comm
