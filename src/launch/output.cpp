#include "launch/output.h"

#include <cerrno>
#include <poll.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace fsdp2::launch {
namespace {

constexpr size_t kLongestLine = 64 * 1024;
constexpr size_t kLinesKept = 20;
constexpr std::string_view kEraseLine = "\x1b[K";

bool is_stack_frame(std::string_view line) { return line.rfind("frame #", 0) == 0; }

}  // namespace

void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd writable{descriptor, POLLOUT, 0};
      poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      throw std::system_error(errno, std::generic_category(), "cannot write the output of a rank");
    }
  }
}

LinePrefixer::LinePrefixer(std::string prefix, int descriptor)
    : prefix_(std::move(prefix)), descriptor_(descriptor), terminal_(isatty(descriptor) == 1) {}

void LinePrefixer::write(std::string_view text) {
  for (const char c : text) {
    if (c == '\n') {
      carriage_return_ = false;
      emit('\n');
      continue;
    }
    if (carriage_return_) idle();
    if (c == '\r') {
      carriage_return_ = !line_.empty();
      continue;
    }
    line_ += c;
    if (line_.size() >= kLongestLine) emit('\n');
  }
}

void LinePrefixer::idle() {
  if (!carriage_return_) return;
  carriage_return_ = false;
  emit('\r');
}

void LinePrefixer::finish() {
  carriage_return_ = false;
  if (!line_.empty()) emit('\n');
}

void LinePrefixer::emit(char end) {
  // What is under the cursor may be a longer progress line.
  std::string out(terminal_ ? kEraseLine : "");
  out += prefix_;
  out += line_;
  out += end;
  if (end == '\n' && !is_stack_frame(line_)) {
    last_lines_.push_back(std::move(line_));
    if (last_lines_.size() > kLinesKept) last_lines_.pop_front();
  }
  line_.clear();
  write_all(descriptor_, out);
}

}  // namespace fsdp2::launch
