#include "support/command.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace fsdp2::testing {

using Clock = std::chrono::steady_clock;

Command::Command(const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& environment)
    : name_(arguments.at(0)), started_(Clock::now()) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0)
    throw std::runtime_error("pipe2 failed");
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    for (const auto& [name, value] : environment) {
      if (value.empty()) {
        unsetenv(name.c_str());
      } else {
        setenv(name.c_str(), value.c_str(), 1);
      }
    }
    std::vector<char*> pointers;
    for (const std::string& argument : arguments)
      pointers.push_back(const_cast<char*>(argument.c_str()));
    pointers.push_back(nullptr);
    execvp(pointers[0], pointers.data());
    perror(pointers[0]);
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

Command::~Command() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const int descriptor : {out_, err_}) {
    if (descriptor >= 0) close(descriptor);
  }
}

void Command::signal(int number) const { kill(pid_, number); }

bool Command::read_some(int timeout_ms) {
  std::array<pollfd, 2> polled{{{out_, POLLIN, 0}, {err_, POLLIN, 0}}};
  if (poll(polled.data(), polled.size(), timeout_ms) <= 0) return false;
  std::array<char, 16384> buffer;
  const auto take = [&](const pollfd& ready, int& descriptor, std::string& text) {
    if (ready.revents == 0) return;
    const ssize_t got = read(descriptor, buffer.data(), buffer.size());
    if (got > 0) {
      text.append(buffer.data(), static_cast<size_t>(got));
    } else {
      close(descriptor);
      descriptor = -1;
    }
  };
  take(polled[0], out_, result_.out);
  take(polled[1], err_, result_.err);
  return true;
}

void Command::wait_for_output(const std::string& text, std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (result_.out.find(text) == std::string::npos &&
         result_.err.find(text) == std::string::npos) {
    if (Clock::now() > deadline || (out_ < 0 && err_ < 0)) {
      FAIL() << name_ << " has not printed '" << text << "' but:\n" << result_.out << result_.err;
    }
    read_some(20);
  }
}

CommandResult Command::wait(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) != pid_) {
    if (Clock::now() > deadline) {
      ADD_FAILURE() << name_ << " still ran after " << limit.count() << " s; its output:\n"
                    << result_.out << result_.err;
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
      break;
    }
    if (!read_some(5)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pid_ = -1;
  result_.elapsed = Clock::now() - started_;
  // What is in the pipes now; a process that it left behind may hold them open.
  while ((out_ >= 0 || err_ >= 0) && read_some(0)) continue;
  result_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result_;
}

CommandResult run_command(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment,
                          std::chrono::seconds limit) {
  Command command(arguments, environment);
  return command.wait(limit);
}

std::string test_variable(const char* name) {
  const char* value = getenv(name);
  EXPECT_NE(value, nullptr) << name << " is not set: run the tests through ctest";
  return value != nullptr ? value : "";
}

bool is_alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && name_end + 2 < stat.size() && stat[name_end + 2] != 'Z';
}

bool ends_within(pid_t pid, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (is_alive(pid)) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace fsdp2::testing
