#pragma once

// The ways in which a process may end, or go on, that exceptions do not cover.

#include <string>

namespace fsdp2::comm {

/// To be called before the first connection is made; cheap after the first time.
void watch_exits();

/// True in a process that was forked from one that had joined a world: connections do not survive.
bool forked_from_a_rank();

/// While one lives: if the process is terminated (gloo throws in threads of its own when ranks send
/// different sizes), stderr says what this thread was waiting for. `what` must outlive it.
class Waiting {
 public:
  explicit Waiting(const std::string& what);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const std::string* what_;
};

}  // namespace fsdp2::comm
