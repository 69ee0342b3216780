#pragma once

// How the ranks of a save or a load talk: messages to all, and errors that are everyone's.

#include <fsdp2/process_group.h>

#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp2::dcp {

/// What a rank reported: every rank throws it, at the same place.
struct FailedEverywhere : c10::Error {
  using c10::Error::Error;
};

class Exchange {
 public:
  /// `group` may be null: the world's, or this process alone. `doing` starts every error.
  Exchange(const ProcessGroup& group, std::string doing);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& doing() const { return doing_; }
  /// The members' ranks in the world.
  const std::vector<int>& ranks() const { return ranks_; }

  /// Runs `body` and sends what it returns to all. If it throws on any rank, throws
  /// FailedEverywhere on all. The
  /// results come in the order of the ranks.
  std::vector<std::string> all(const std::function<std::string()>& body) const;
  void agree(const std::function<void()>& body) const;

 private:
  ProcessGroup group_;
  std::string doing_;
  int rank_ = 0, size_ = 1;
  std::vector<int> ranks_;
};

/// For an option `threads`.
int thread_count(int asked, const Exchange& exchange);

/// Runs all of them, each in a thread, and throws what the first to fail threw.
void in_threads(const std::vector<std::function<void()>>& jobs);

}  // namespace fsdp2::dcp
