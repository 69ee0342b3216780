#pragma once

// What a run tells while it runs: a line that is rewritten on a terminal, lines at intervals
// elsewhere, and a JSON object a line in a metrics file.

#include <chrono>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace fsdp2::train {

struct StepReport {
  int64_t step = 0;  // counted from 1: steps that are done
  double loss = 0, grad_norm = 0, lr = 0;
  int64_t tokens = 0;  // of this step, all ranks together
};

class Progress {
 public:
  /// `metrics` may be empty. Error naming it if it cannot be opened. A Progress that is not
  /// `active` says nothing. Validation losses are in nats a `unit`.
  Progress(bool active, int64_t steps, int64_t log_every, const std::string& metrics,
           std::string unit = "byte");
  ~Progress();

  void step(const StepReport& report);
  void validation(int64_t step, double loss);
  /// A line of its own, above the live one.
  void note(const std::string& text);

 private:
  double elapsed() const;
  void erase_live_line();

  const bool active_, terminal_;
  const int64_t steps_, log_every_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::ofstream metrics_;
  std::string metrics_path_, unit_;
  std::optional<double> validation_;
  double last_time_ = 0, last_shown_ = 0;
  double seconds_a_step_ = 0;  // running mean
  bool live_ = false;
};

/// "2:05", "1:02:05"
std::string clock_text(double seconds);

}  // namespace fsdp2::train
