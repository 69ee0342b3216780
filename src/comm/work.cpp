#include "comm/work.h"

#include "comm/rendezvous.h"

#include <c10/util/Exception.h>

namespace fsdp2::comm {

std::string CallText::where() const {
  if (!group) return {};
  return c10::str(" in group '", group->getGroupName(), "' on rank ", group->getRank(), " of ",
                  group->getSize());
}

std::string CallText::text() const {
  return c10::str(name, " of ", elements, " x ", type, where());
}

CollectiveWork::CollectiveWork(c10::intrusive_ptr<c10d::Work> inner,
                               std::vector<at::Tensor> tensors, CallText what,
                               std::function<void()> finish)
    : inner_(std::move(inner)),
      tensors_(std::move(tensors)),
      what_(std::move(what)),
      finish_(std::move(finish)) {}

bool CollectiveWork::isCompleted() { return !inner_ || inner_->isCompleted(); }

bool CollectiveWork::isSuccess() const { return !inner_ || inner_->isSuccess(); }

std::exception_ptr CollectiveWork::exception() const {
  return inner_ ? inner_->exception() : nullptr;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(finish_mutex_);
  if (inner_) {
    bool done = false;
    try {
      done = inner_->wait(timeout);
    } catch (const std::exception& error) {
      throw_collective_error(what_.text(), error, started_);
    }
    TORCH_CHECK(done, what_.text(), " was aborted");
  }
  if (finish_) {
    finish_();
    finish_ = nullptr;
  }
  return true;
}

void CollectiveWork::abort() {
  if (inner_) inner_->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  TORCH_CHECK(inner_ && !finish_, what_.text(),
              ": it has no future, because part of it happens in wait()");
  return inner_->getFuture();
}

void throw_collective_error(const std::string& what, const std::exception& error,
                            std::chrono::steady_clock::time_point started) {
  const std::string reason = plain_message(error);
  const auto after = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - started);
  const bool timed_out =
      reason.find("imed out") != std::string::npos || reason.find("imeout") != std::string::npos;
  TORCH_CHECK(!dynamic_cast<const PeerError*>(&error), what,
              timed_out ? " timed out after " : " failed after ", duration_text(after), ": ",
              reason);
  TORCH_CHECK(false, what, timed_out ? " timed out after " : " failed after ", duration_text(after),
              ": ",
              timed_out ? "a rank of the group has not called it, or is too slow"
                        : "a rank of the group has ended or the connection is lost",
              ". The cause: ", reason);
}

}  // namespace fsdp2::comm
