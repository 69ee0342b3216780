#pragma once

// Processes: finding a program, starting it with its output in our hands, ending everything below
// us.

#include <signal.h>
#include <string>
#include <sys/types.h>
#include <vector>

namespace fsdp2::launch {

/// The file to execute for `name`: itself if it has a '/', else the first match in PATH. Throws
/// LaunchError (kNotFound, kCannotExecute) with what is wrong.
std::string find_program(const std::string& name);

struct StartOptions {
  std::string program;
  std::vector<std::string> arguments;    // with argv[0]
  std::vector<std::string> environment;  // NAME=value
  sigset_t signal_mask;
  /// Read what it prints through Process::output and ::error; else it prints to our own stdout and
  /// stderr.
  bool capture = true;
  /// Give it a terminal as stdout, so that it flushes after each line.
  bool terminal = false;
};

struct Process {
  pid_t pid = -1;
  /// Non-blocking, to be closed by the caller; -1 if not captured.
  int output = -1;
  int error = -1;
};

/// Starts a program as the leader of a process group of its own, with nothing on stdin. It is
/// killed when the calling thread ends. Throws LaunchError if it cannot be executed.
Process start(const StartOptions& options);

/// Makes this process the parent of whatever its descendants leave behind.
void adopt_orphans();
/// SIGKILLs and reaps every process below this one. Needs adopt_orphans().
void kill_descendants();

/// "SIGKILL"
std::string signal_name(int signal);

}  // namespace fsdp2::launch
