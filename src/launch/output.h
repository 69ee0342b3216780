#pragma once

// What the ranks print, brought together: whole lines, each with its rank in front.

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace fsdp2::launch {

/// Cuts what one rank writes to one stream into lines and writes each with a prefix to
/// `descriptor`, in one piece. A line that ends in a carriage return (a progress bar) keeps it, so
/// that it is overwritten on a terminal by whichever line comes next. Not thread-safe.
class LinePrefixer {
 public:
  LinePrefixer(std::string prefix, int descriptor);

  void write(std::string_view text);
  /// Nothing came for a while: shows a progress line that write() kept back to see whether a
  /// newline follows.
  void idle();
  /// The stream ended: writes what has no newline yet.
  void finish();

  /// The last lines, without libtorch's stack frames.
  const std::deque<std::string>& last_lines() const { return last_lines_; }
  bool holds_progress() const { return carriage_return_; }

 private:
  void emit(char end);

  std::string prefix_;
  int descriptor_;
  bool terminal_;
  std::string line_;              // what has come of the line so far
  bool carriage_return_ = false;  // line_ was ended by one
  std::deque<std::string> last_lines_;
};

/// Writes all of `text`. Throws std::system_error, e.g. when the reader has gone.
void write_all(int descriptor, std::string_view text);

}  // namespace fsdp2::launch
