#pragma once

// The ways in which a process may end, or go on, that exceptions do not cover.

#include <string>

namespace fsdp2::comm {

/// To be called before the first connection is made; cheap after the first time.
void watch_exits();

/// True in a process that was forked from one that had joined a world: connections do not survive.
bool forked_from_a_rank();
/// Error if so. `what` was going to be done.
void check_not_forked(const std::string& what);

/// If the process is terminated after this (gloo throws in threads of its own when ranks send
/// different sizes), stderr says that it was `doing` that. The last call counts.
void note_doing(const std::string& doing);

}  // namespace fsdp2::comm
