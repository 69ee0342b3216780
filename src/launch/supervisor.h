#pragma once

// The ranks of this host while they run.

#include "launch/launch.h"

#include <signal.h>
#include <string>

namespace fsdp2::launch {

/// Starts the ranks, passes on what they print and the signals that arrive, ends all of them when
/// one fails or `parent_pipe` reaches its end, and returns the launcher's exit code. `program` is
/// the file to execute. The signals of forwarded_signals() and SIGCHLD must be blocked;
/// `signal_mask` is what the ranks get.
int supervise(const LaunchOptions& options, const std::string& program, int parent_pipe,
              const sigset_t& signal_mask);

/// Those that end the ranks, or (SIGUSR1, SIGUSR2) are only passed on to them.
sigset_t forwarded_signals();

}  // namespace fsdp2::launch
