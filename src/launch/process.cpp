#include "launch/process.h"

#include "launch/launch.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <system_error>
#include <termios.h>
#include <thread>
#include <unistd.h>

namespace fsdp2::launch {
namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

bool is_executable_file(const std::string& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
}

struct Stream {
  int ours;
  int theirs;
};

Stream make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe");
  return {ends[0], ends[1]};
}

/// A pseudo-terminal that passes bytes on as they are and has the size of our own.
Stream make_terminal() {
  const int ours = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (ours < 0 || grantpt(ours) != 0 || unlockpt(ours) != 0) throw_errno("posix_openpt");
  char name[128];
  if (ptsname_r(ours, name, sizeof(name)) != 0) throw_errno("ptsname_r");
  const int theirs = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (theirs < 0) throw_errno(name);
  termios settings{};
  tcgetattr(theirs, &settings);
  cfmakeraw(&settings);
  tcsetattr(theirs, TCSANOW, &settings);
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) ioctl(theirs, TIOCSWINSZ, &size);
  return {ours, theirs};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<pid_t> children() {
  std::vector<pid_t> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ptr !=
        name.data() + name.size())
      continue;
    std::ifstream file(entry.path() / "stat");
    const std::string stat{std::istreambuf_iterator<char>(file), {}};
    // pid (name, which may contain anything) state parent ...
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || name_end + 4 >= stat.size()) continue;
    if (strtol(stat.c_str() + name_end + 4, nullptr, 10) == getpid()) result.push_back(pid);
  }
  return result;
}

}  // namespace

std::string find_program(const std::string& name) {
  std::vector<std::string> candidates;
  if (name.find('/') != std::string::npos) {
    candidates.push_back(name);
  } else {
    const char* path = getenv("PATH");
    std::string rest = path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin";
    for (size_t begin = 0; begin <= rest.size();) {
      const size_t end = std::min(rest.find(':', begin), rest.size());
      const std::string folder = rest.substr(begin, end - begin);
      candidates.push_back((folder.empty() ? "." : folder) + "/" + name);
      begin = end + 1;
    }
  }
  std::string unusable;
  for (const std::string& candidate : candidates) {
    if (is_executable_file(candidate)) return candidate;
    if (unusable.empty() && access(candidate.c_str(), F_OK) == 0) unusable = candidate;
  }
  if (!unusable.empty()) {
    const bool folder = std::filesystem::is_directory(unusable);
    const bool python = std::filesystem::path(name).extension() == ".py";
    throw LaunchError(kCannotExecute,
                      "program '" + unusable + "' " +
                          (folder ? "is a folder" : "is not executable") +
                          (python ? "; for a Python program write: python3 " + name : ""));
  }
  if (name.find('/') != std::string::npos) {
    throw LaunchError(kNotFound, "program '" + name + "' does not exist");
  }
  std::string hint;
  if (access(name.c_str(), F_OK) == 0) hint = "; for the file in this folder write: ./" + name;
  throw LaunchError(kNotFound, "program '" + name + "' was not found in PATH" + hint);
}

Process start(const StartOptions& options) {
  // Everything that allocates comes before fork().
  const std::vector<char*> arguments = pointers(options.arguments);
  const std::vector<char*> environment = pointers(options.environment);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing < 0) throw_errno("/dev/null");
  Stream output{-1, -1};
  Stream error{-1, -1};
  if (options.capture) {
    output = options.terminal ? make_terminal() : make_pipe();
    error = make_pipe();
  }
  const Stream exec_error = make_pipe();
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw_errno("fork");
  if (pid == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(kCannotExecute);
    dup2(nothing, STDIN_FILENO);
    if (options.capture) {
      dup2(output.theirs, STDOUT_FILENO);
      dup2(error.theirs, STDERR_FILENO);
    }
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &options.signal_mask, nullptr);
    execve(options.program.c_str(), arguments.data(), environment.data());
    const int reason = errno;
    [[maybe_unused]] const ssize_t told = write(exec_error.theirs, &reason, sizeof(reason));
    _exit(kCannotExecute);
  }
  setpgid(pid, pid);  // in both, so that it is true for both from here on
  close(nothing);
  close(exec_error.theirs);
  if (options.capture) {
    close(output.theirs);
    close(error.theirs);
    fcntl(output.ours, F_SETFL, O_NONBLOCK);
    fcntl(error.ours, F_SETFL, O_NONBLOCK);
  }
  int reason = 0;
  ssize_t told;
  do {
    told = read(exec_error.ours, &reason, sizeof(reason));
  } while (told < 0 && errno == EINTR);
  close(exec_error.ours);
  if (told == sizeof(reason)) {
    throw LaunchError(
        kCannotExecute,
        "cannot execute '" + options.program + "': " + strerror(reason) +
            (reason == ENOEXEC ? " (a script needs a first line like #!/bin/sh)" : ""));
  }
  return {pid, output.ours, error.ours};
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

void kill_descendants() {
  // What a killed process leaves becomes our child, so killing children until there are none gets
  // all. One that sits in the kernel for longer than this is left to the kernel.
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < give_up) {
    pid_t reaped;
    while ((reaped = waitpid(-1, nullptr, WNOHANG)) > 0) continue;
    if (reaped < 0 && errno == ECHILD) return;
    for (const pid_t child : children()) kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

}  // namespace fsdp2::launch
