#include "launch/supervisor.h"

#include "launch/environment.h"
#include "launch/output.h"
#include "launch/process.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <memory>
#include <poll.h>
#include <random>
#include <sstream>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

namespace fsdp2::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kProgressDelay(100);
constexpr std::chrono::milliseconds kDrainLimit(500);

std::string new_run_id() {
  std::random_device random;
  std::ostringstream id;
  id << std::hex << random() << random();
  return id.str();
}

std::string describe(int status) {
  if (WIFEXITED(status)) return "exit code " + std::to_string(WEXITSTATUS(status));
  return "killed by " + signal_name(WTERMSIG(status));
}

/// Dying of a signal can't be the consequence of a peer's death; an exit code or an abort can.
bool is_surely_own(int status) { return WIFSIGNALED(status) && WTERMSIG(status) != SIGABRT; }

int exit_code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct Rank {
  int rank = 0;  // global
  Process process;
  std::unique_ptr<LinePrefixer> output;
  std::unique_ptr<LinePrefixer> error;
  bool running = true;
  int status = 0;
};

class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, int parent_pipe)
      : options_(options), parent_pipe_(parent_pipe) {
    sigset_t signals = forwarded_signals();
    sigaddset(&signals, SIGCHLD);
    signals_ = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals_ < 0) throw std::system_error(errno, std::generic_category(), "signalfd");
  }

  void start_all(const std::string& program, const sigset_t& signal_mask) {
    StartOptions start_options;
    start_options.program = program;
    start_options.arguments = options_.command;
    start_options.signal_mask = signal_mask;
    // One rank has the terminal to itself.
    start_options.capture = options_.processes * options_.nodes > 1;
    start_options.terminal = isatty(STDOUT_FILENO) == 1;
    const std::string run_id = new_run_id();
    for (int local = 0; local < options_.processes; ++local) {
      start_options.environment = merged_environment(worker_variables(options_, local, run_id));
      Rank& rank = ranks_.emplace_back();
      rank.rank = options_.node_rank * options_.processes + local;
      const std::string prefix = "[rank " + std::to_string(rank.rank) + "] ";
      rank.output = std::make_unique<LinePrefixer>(prefix, STDOUT_FILENO);
      rank.error = std::make_unique<LinePrefixer>(prefix, STDERR_FILENO);
      rank.process = start(start_options);
    }
    started_ = Clock::now();
  }

  int run() {
    while (any_running() && !parent_gone_) {
      wait_for_events();
      if (kill_at_ && Clock::now() >= *kill_at_) kill_stubborn();
    }
    kill_descendants();
    if (parent_gone_) return 128 + SIGKILL;
    drain();
    return report();
  }

 private:
  bool any_running() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; });
  }

  void wait_for_events() {
    std::vector<pollfd> polled{{signals_, POLLIN, 0}, {parent_pipe_, POLLIN, 0}};
    bool holds_progress = false;
    for (const Rank& rank : ranks_) {
      polled.push_back({rank.process.output, POLLIN, 0});
      polled.push_back({rank.process.error, POLLIN, 0});
      holds_progress |= rank.output->holds_progress() || rank.error->holds_progress();
    }
    int timeout = holds_progress ? static_cast<int>(kProgressDelay.count()) : -1;
    if (kill_at_) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(*kill_at_ - Clock::now()).count();
      const int until_kill = static_cast<int>(std::max<int64_t>(0, left));
      timeout = timeout < 0 ? until_kill : std::min(timeout, until_kill);
    }
    const int ready = poll(polled.data(), polled.size(), timeout);
    if (ready == 0) {
      for (Rank& rank : ranks_) {
        rank.output->idle();
        rank.error->idle();
      }
    }
    if (ready <= 0) return;
    if (polled[1].revents != 0) parent_gone_ = true;
    // Before the exits, so that a rank's last words are there when its end is noticed.
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (polled[2 + 2 * i].revents != 0) pump(ranks_[i].process.output, *ranks_[i].output);
      if (polled[3 + 2 * i].revents != 0) pump(ranks_[i].process.error, *ranks_[i].error);
    }
    if (polled[0].revents != 0) handle_signals();
  }

  /// Passes on what is there; closes the descriptor at its end.
  void pump(int& descriptor, LinePrefixer& prefixer) {
    if (descriptor < 0) return;
    std::array<char, 16384> buffer;
    const ssize_t got = read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    try {
      if (got > 0) {
        prefixer.write({buffer.data(), static_cast<size_t>(got)});
        return;
      }
      prefixer.finish();
    } catch (const std::system_error&) {
      // Nobody reads what we print any more.
      if (!stop_signal_) stop(SIGPIPE);
    }
    if (got > 0) return;
    close(descriptor);
    descriptor = -1;
  }

  void handle_signals() {
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal == SIGUSR1 || signal == SIGUSR2) {
        send_all(signal);
      } else {
        stop(signal);
      }
    }
  }

  void reap() {
    std::vector<Rank*> failed;
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto rank = std::find_if(ranks_.begin(), ranks_.end(),
                                     [&](const Rank& r) { return r.process.pid == pid; });
      if (rank == ranks_.end()) continue;  // an orphan of a rank
      rank->running = false;
      rank->status = status;
      if (exit_code_of(status) != 0) failed.push_back(&*rank);
    }
    if (failed.empty() || first_failure_ || stop_signal_) return;
    const auto own = std::find_if(failed.begin(), failed.end(),
                                  [](Rank* rank) { return is_surely_own(rank->status); });
    first_failure_ = own != failed.end() ? *own : failed.front();
    failed_after_ = Clock::now() - started_;
    if (!any_running()) return;
    say("rank " + std::to_string(first_failure_->rank) + " failed (" +
        describe(first_failure_->status) + "): ending the other ranks");
    send_all(SIGTERM);
    kill_at_ = Clock::now() + options_.grace.value_or(std::chrono::seconds(5));
  }

  /// A signal to the launcher: the ranks get it, and some time; a second one takes the time away.
  void stop(int signal) {
    if (stop_signal_) {
      kill_at_ = Clock::now();
      return;
    }
    stop_signal_ = signal;
    say("received " + signal_name(signal) + ": ending all ranks");
    send_all(signal == SIGPIPE ? SIGTERM : signal);
    if (!kill_at_) kill_at_ = Clock::now() + options_.grace.value_or(std::chrono::seconds(30));
  }

  /// To each rank and its own children. What an ended rank has left is killed in the end: its
  /// process group's number may be another's by now.
  void send_all(int signal) {
    for (const Rank& rank : ranks_) {
      if (rank.running) kill(-rank.process.pid, signal);
    }
  }

  void kill_stubborn() {
    kill_at_.reset();
    for (const Rank& rank : ranks_) {
      if (!rank.running) continue;
      say("rank " + std::to_string(rank.rank) + " did not end in time: killing it");
      kill(-rank.process.pid, SIGKILL);
    }
  }

  /// What is left in the pipes; their writers are dead.
  void drain() {
    const auto limit = Clock::now() + kDrainLimit;
    for (Rank& rank : ranks_) {
      while (rank.process.output >= 0 && Clock::now() < limit)
        pump(rank.process.output, *rank.output);
      while (rank.process.error >= 0 && Clock::now() < limit) pump(rank.process.error, *rank.error);
    }
  }

  int report() const {
    if (first_failure_) {
      const Rank& rank = *first_failure_;
      std::ostringstream text;
      text.precision(1);
      text << "rank " << rank.rank << " failed first: " << describe(rank.status) << ", "
           << std::fixed << std::chrono::duration<double>(failed_after_).count()
           << " s after the start";
      if (WIFSIGNALED(rank.status) && WTERMSIG(rank.status) == SIGKILL) {
        text << "\n  nobody here sent it SIGKILL: often the kernel did, for lack of memory (see "
                "dmesg)";
      }
      const auto& lines = rank.error->last_lines();
      if (!lines.empty()) text << "\n  the last that rank " << rank.rank << " wrote to stderr:";
      for (const std::string& line : lines) text << "\n    " << line;
      say(text.str());
      return exit_code_of(rank.status);
    }
    return stop_signal_ ? 128 + *stop_signal_ : 0;
  }

  static void say(const std::string& text) {
    try {
      write_all(STDERR_FILENO, "fsdp2 run: " + text + "\n");
    } catch (const std::system_error&) {
      // Nobody listens.
    }
  }

  const LaunchOptions& options_;
  const int parent_pipe_;
  int signals_ = -1;
  std::vector<Rank> ranks_;
  Clock::time_point started_;
  bool parent_gone_ = false;
  const Rank* first_failure_ = nullptr;
  Clock::duration failed_after_{};
  std::optional<int> stop_signal_;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace

sigset_t forwarded_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    sigaddset(&signals, signal);
  return signals;
}

int supervise(const LaunchOptions& options, const std::string& program, int parent_pipe,
              const sigset_t& signal_mask) {
  signal(SIGPIPE, SIG_IGN);
  adopt_orphans();
  Supervisor supervisor(options, parent_pipe);
  try {
    supervisor.start_all(program, signal_mask);
  } catch (...) {
    kill_descendants();
    throw;
  }
  return supervisor.run();
}

}  // namespace fsdp2::launch
