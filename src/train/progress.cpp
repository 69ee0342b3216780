#include "train/progress.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <unistd.h>

namespace fsdp2::train {
namespace {

constexpr double kSmoothing = 0.05;      // weight of the newest step in the running mean
constexpr double kRefreshSeconds = 0.1;  // of the live line

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[256];
  std::snprintf(text, sizeof(text), pattern, args...);
  return text;
}

}  // namespace

std::string clock_text(double seconds) {
  const auto whole = static_cast<long long>(std::llround(std::max(0.0, seconds)));
  if (whole < 3600) return format("%lld:%02lld", whole / 60, whole % 60);
  return format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

Progress::Progress(bool active, int64_t steps, int64_t log_every, const std::string& metrics,
                   std::string unit)
    : active_(active),
      terminal_(::isatty(STDERR_FILENO) == 1),
      steps_(steps),
      log_every_(log_every),
      metrics_path_(metrics),
      unit_(std::move(unit)) {
  if (!active_ || metrics.empty()) return;
  metrics_.open(metrics, std::ios::trunc);
  TORCH_CHECK_VALUE(metrics_.good(), "cannot write the metrics file ", metrics);
}

Progress::~Progress() {
  if (live_) std::fputc('\n', stderr);
}

double Progress::elapsed() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::erase_live_line() {
  if (live_) std::fputs("\r\x1b[K", stderr);
  live_ = false;
}

void Progress::step(const StepReport& report) {
  if (!active_) return;
  const double now = elapsed();
  const double seconds = now - last_time_;
  last_time_ = now;
  // The first step warms caches up; the mean starts over after it.
  seconds_a_step_ =
      report.step <= 2 ? seconds : seconds_a_step_ + kSmoothing * (seconds - seconds_a_step_);
  const double tokens_per_s = static_cast<double>(report.tokens) / std::max(seconds_a_step_, 1e-9);
  if (metrics_.is_open()) {
    const nlohmann::ordered_json line = {
        {"step", report.step}, {"loss", report.loss},     {"grad_norm", report.grad_norm},
        {"lr", report.lr},     {"tokens", report.tokens}, {"step_s", seconds},
        {"elapsed_s", now}};
    metrics_ << line.dump() << std::endl;
  }
  const bool last = report.step == steps_;
  const bool show = terminal_ ? last || now - last_shown_ > kRefreshSeconds
                              : last || report.step == 1 || report.step % log_every_ == 0;
  if (!show) return;
  last_shown_ = now;
  auto text = format("step %lld/%lld  loss %.3f", static_cast<long long>(report.step),
                     static_cast<long long>(steps_), report.loss);
  if (validation_) text += format("  val %.3f", *validation_);
  text += format("  grad norm %.2f  %.0f tokens/s  %s left", report.grad_norm, tokens_per_s,
                 clock_text(seconds_a_step_ * static_cast<double>(steps_ - report.step)).c_str());
  erase_live_line();
  std::fputs(text.c_str(), stderr);
  if (terminal_) {
    live_ = true;
  } else {
    std::fputc('\n', stderr);
  }
  std::fflush(stderr);
}

void Progress::validation(int64_t step, double loss) {
  validation_ = loss;
  last_time_ = elapsed();
  if (metrics_.is_open()) {
    metrics_ << nlohmann::ordered_json{{"step", step},
                                       {"validation_loss", loss},
                                       {"elapsed_s", last_time_}}
                    .dump()
             << std::endl;
  }
  note(format("step %lld  validation loss %.4f nats/%s", static_cast<long long>(step), loss,
              unit_.c_str()));
}

void Progress::note(const std::string& text) {
  if (!active_) return;
  erase_live_line();
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace fsdp2::train
