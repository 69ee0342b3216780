#include "launch/launch.h"

#include "launch/port.h"
#include "launch/process.h"
#include "launch/supervisor.h"

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <iostream>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

namespace fsdp2::launch {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw LaunchError(kBadOptions, what); }

/// Checks everything that can be known before a process is started, and decides the port.
LaunchOptions checked(LaunchOptions options) {
  if (options.command.empty()) refuse("no program given: fsdp2 run -n 2 PROGRAM [ARGUMENTS]");
  if (options.processes < 1)
    refuse("--nproc-per-node must be at least 1, not " + std::to_string(options.processes));
  if (options.nodes < 1)
    refuse("--nnodes must be at least 1, not " + std::to_string(options.nodes));
  if (options.node_rank < 0 || options.node_rank >= options.nodes) {
    refuse("--node-rank must be from 0 to " + std::to_string(options.nodes - 1) + ", not " +
           std::to_string(options.node_rank));
  }
  if (options.master_port && (*options.master_port < 1 || *options.master_port > 65535)) {
    refuse("--master-port must be from 1 to 65535, not " + std::to_string(*options.master_port));
  }
  if (options.nodes > 1 && !options.master_port) {
    refuse("with --nnodes " + std::to_string(options.nodes) +
           ", give every node the same --master-addr (the host of node 0) and --master-port");
  }
  if (!options.master_port) {
    options.master_port = free_port();
  } else if (options.node_rank == 0 && !port_is_free(*options.master_port)) {
    refuse("port " + std::to_string(*options.master_port) +
           " is in use on this host: choose another with --master-port, or leave the option out to "
           "get a free one");
  }
  return options;
}

int supervisor_process(const LaunchOptions& options, const std::string& program, int parent_pipe,
                       const sigset_t& signal_mask) {
  // Its own session: a signal to the launcher's process group, SIGKILL included, must not reach it
  // directly.
  setsid();
  try {
    return supervise(options, program, parent_pipe, signal_mask);
  } catch (const LaunchError& error) {
    std::cerr << "fsdp2 run: " << error.what() << std::endl;
    return error.exit_code;
  } catch (const std::exception& error) {
    std::cerr << "fsdp2 run: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace

// Two processes, each of which cleans up if the other is killed: this one, which gets the signals,
// and below it the supervisor, which has the ranks.
int launch(const LaunchOptions& given) {
  const std::string program = given.command.empty() ? "" : find_program(given.command.front());
  const LaunchOptions options = checked(given);
  int life_line[2];  // its writing end is open as long as this process lives
  if (pipe2(life_line, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "pipe");
  sigset_t watched = forwarded_signals();
  sigaddset(&watched, SIGCHLD);
  sigset_t previous;
  sigprocmask(SIG_BLOCK, &watched, &previous);
  adopt_orphans();
  const pid_t supervisor = fork();
  if (supervisor < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (supervisor == 0) {
    close(life_line[1]);
    _exit(supervisor_process(options, program, life_line[0], previous));
  }
  close(life_line[0]);
  int status = 0;
  for (;;) {
    const int signal = sigwaitinfo(&watched, nullptr);
    if (signal == SIGCHLD) {
      if (waitpid(supervisor, &status, WNOHANG) == supervisor) break;
    } else if (signal > 0) {
      kill(supervisor, signal);
    }
  }
  close(life_line[1]);
  kill_descendants();
  sigprocmask(SIG_SETMASK, &previous, nullptr);
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::cerr << "fsdp2 run: the launcher's supervisor was killed by "
            << signal_name(WTERMSIG(status)) << "; all ranks have been killed" << std::endl;
  return 128 + WTERMSIG(status);
}

}  // namespace fsdp2::launch
