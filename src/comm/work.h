#pragma once

// The work that collectives.h returns: a backend's work, what is left to do after it, and words for
// its errors.

#include <fsdp2/process_group.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/types.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp2::comm {

/// A backend's error that says all there is to say: which rank, and what happened to it.
struct PeerError : c10::Error {
  using c10::Error::Error;
};

/// What a work is, in words that are made when they are needed.
struct CallText {
  const char* name = "";
  int64_t elements = 0;
  at::ScalarType type{};
  ProcessGroup group;

  std::string text() const;
  std::string where() const;
};

class CollectiveWork final : public c10d::Work {
 public:
  /// `inner` may be null: then only `finish` is left. `finish` runs once, in the first wait().
  /// `tensors` are kept alive.
  CollectiveWork(c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> tensors,
                 CallText what, std::function<void()> finish = {});

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  std::vector<at::Tensor> tensors_;
  const CallText what_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::mutex finish_mutex_;
  std::function<void()> finish_;
};

/// Rethrows the current exception of a backend as an error that says what failed, and how long
/// after its start.
[[noreturn]] void throw_collective_error(const std::string& what, const std::exception& error,
                                         std::chrono::steady_clock::time_point started);

}  // namespace fsdp2::comm
