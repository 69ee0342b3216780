#pragma once

// Other programs inside one test: started, signalled, and read to the end.

#include <chrono>
#include <map>
#include <string>
#include <sys/types.h>
#include <vector>

namespace fsdp2::testing {

struct CommandResult {
  int exit_code = -1;  // 128 + signal if one killed it
  std::string out;
  std::string err;
  std::chrono::duration<double> elapsed{};
};

/// A running program. It is killed if it still runs when this is destroyed or the limit of wait()
/// is over.
class Command {
 public:
  /// `environment` is added to the test's own; an empty value unsets.
  explicit Command(const std::vector<std::string>& arguments,
                   const std::map<std::string, std::string>& environment = {});
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  /// Waits until it has printed `text` to stdout or stderr. Test failure after `limit`.
  void wait_for_output(const std::string& text,
                       std::chrono::seconds limit = std::chrono::seconds(30));
  /// What it has printed to stdout so far.
  const std::string& output() const { return result_.out; }
  /// Waits for its end. Test failure after `limit`.
  CommandResult wait(std::chrono::seconds limit = std::chrono::seconds(60));

 private:
  bool read_some(int timeout_ms);

  std::string name_;
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  CommandResult result_;
  std::chrono::steady_clock::time_point started_;
};

CommandResult run_command(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment = {},
                          std::chrono::seconds limit = std::chrono::seconds(60));

/// The value of a variable that CMake set for the tests; test failure if it is not set.
std::string test_variable(const char* name);

/// True if a process is there and has not ended (a zombie has).
bool is_alive(pid_t pid);
/// Waits until it is not; false after `limit`.
bool ends_within(pid_t pid, std::chrono::milliseconds limit);

}  // namespace fsdp2::testing
