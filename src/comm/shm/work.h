#pragma once

// Works of backend "shm".

#include "comm/shm/segment.h"

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace fsdp2::comm {

class ShmEngine;
class ShmDriver;

class ShmWork : public c10d::Work {
 public:
  /// `kept`: tensors that this reads and writes, the first `outputs` of them the result.
  ShmWork(std::shared_ptr<ShmEngine> engine, std::shared_ptr<ShmDriver> driver,
          std::vector<at::Tensor> kept, size_t outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  /// From here on a thread of the backend drives the work.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call.sequence; }
  void abort() override;

  bool over() const { return state_.load(std::memory_order_acquire) != State::kOpen; }
  /// Of the engine, once; `error` is empty if all went well.
  void set_over(const std::string& error);
  /// Tells who has asked for a future.
  void tell();

  ShmCall call;
  std::chrono::milliseconds timeout{-1};  // of this call, if it has one

 private:
  enum class State : uint8_t { kOpen, kDone, kFailed };
  std::exception_ptr error() const;

  const std::shared_ptr<ShmEngine> engine_;
  const std::shared_ptr<ShmDriver> driver_;
  const std::vector<at::Tensor> kept_;
  const size_t outputs_;
  std::atomic<State> state_ = State::kOpen;
  std::string error_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool told_ = false;
};

/// A collective, as chunks that this rank sends to all others and reads from each of them. The
/// engine calls the virtual functions with its mutex held.
class ShmCollective : public ShmWork {
 public:
  using ShmWork::ShmWork;

  /// Whether chunk `index` can be written: it may depend on what has been read.
  virtual bool can_write(uint32_t /*index*/) const { return true; }
  /// Writes it. Returns whether it is the last; there is at least one, if only for its header.
  virtual bool write(uint32_t index, std::byte* to) = 0;
  /// A chunk of one rank.
  virtual void read(int /*peer*/, uint32_t /*index*/, const std::byte* /*from*/, bool /*last*/) {}
  /// The chunks `index` of all others, if they are read together; null at the own rank's. The list
  /// may be changed.
  virtual void read_all(uint32_t /*index*/, std::span<const std::byte*> /*from*/) {}

  bool together = false;

  // Of the engine.
  uint32_t sent = 0;
  bool all_sent = false;
  struct Incoming {
    uint32_t read = 0;
    bool finished = false;
  };
  c10::SmallVector<Incoming, 8> incoming;
  int unfinished = 0;  // of the others
};

/// Drives works whose futures are wanted, in a thread that the first of them starts.
class ShmDriver {
 public:
  explicit ShmDriver(std::shared_ptr<ShmEngine> engine);
  ~ShmDriver();
  ShmDriver(const ShmDriver&) = delete;
  ShmDriver& operator=(const ShmDriver&) = delete;

  void drive(c10::intrusive_ptr<ShmWork> work);
  /// When the engine is closed. The thread ends.
  void stop();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace fsdp2::comm
