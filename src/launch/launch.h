#pragma once

// Starting a program on several ranks of this host and ending it: what `fsdp2 run` does.

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp2::launch {

struct LaunchOptions {
  /// The program, looked up in PATH if it has no '/', and its arguments.
  std::vector<std::string> command;
  int processes = 1;  // on this host
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  /// Not given: a free one. Must be given if there are several nodes.
  std::optional<int> master_port;
  /// From the first SIGTERM to SIGKILL. Not given: 5 s after a rank failed, 30 s after a signal to
  /// the launcher (a trainer may be saving).
  std::optional<std::chrono::milliseconds> grace;
};

/// Why nothing was started; `exit_code` is what the launcher should leave with.
struct LaunchError : std::runtime_error {
  LaunchError(int exit_code, const std::string& what)
      : std::runtime_error(what), exit_code(exit_code) {}
  int exit_code;
};

constexpr int kBadOptions = 2;
constexpr int kCannotExecute = 126;
constexpr int kNotFound = 127;

/// Runs the program on every rank until all have ended, and returns the launcher's exit code: 0 if
/// every rank left with 0; the code of the rank that failed first, or 128 + its signal; 128 +
/// signal if the launcher was told to stop. No process that a rank started is left when it returns,
/// nor when the launcher itself is killed. Throws LaunchError, before any process is started, if an
/// option is wrong, the program is not there or the port is in use. To be called in a process
/// without other threads and children; changes its signal mask.
int launch(const LaunchOptions& options);

}  // namespace fsdp2::launch
