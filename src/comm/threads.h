#pragma once

// What works that a thread of the backend ends have in common.

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <thread>

namespace fsdp2::comm {

/// Of a list of tensors, as c10d's works give.
inline c10::intrusive_ptr<c10::ivalue::Future> new_tensors_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

/// Waits for a thread that has been told to end; if that is the caller's own, because what a future
/// told dropped the group, it ends by itself.
inline void let_end(std::thread thread) {
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

}  // namespace fsdp2::comm
