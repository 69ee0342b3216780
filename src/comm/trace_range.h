#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string_view>

namespace fsdp2::comm {

/// Until the end of the scope, a range called `name` in whatever profiler listens to this thread.
/// Where none does, this costs a few nanoseconds; `name` is to be made once, not for each call. A
/// user scope, as Python's `record_function` makes them.
///
/// Names that start with "fsdp2::" are the library's. What traces are read by, so they stay:
///   fsdp2::gather GROUP        starts an all-gather
///   fsdp2::wait gather GROUP   until the whole parameters are there
///   fsdp2::reduce GROUP        starts the reduction of gradients
///   fsdp2::wait reduce GROUP   until this rank's part of them is there, added up
///   fsdp2::clip_grad_norm_, fsdp2::wait norm, fsdp2::optimizer, fsdp2::wait replicas
class TraceRange {
 public:
  explicit TraceRange(std::string_view name) {
    if (auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      range_.emplace(std::move(*listeners));
      range_->before(name);
    }
  }

 private:
  std::optional<at::RecordFunction> range_;
};

}  // namespace fsdp2::comm
