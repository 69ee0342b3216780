#pragma once

// How long and from which seed the randomised tests run: a few fixed seeds, or FSDP2_FUZZ_SECONDS
// of new ones.

#include <chrono>
#include <cstdlib>
#include <random>

namespace fsdp2::testing {

/// 0 in an ordinary run.
inline std::chrono::seconds fuzz_time() {
  const char* text = std::getenv("FSDP2_FUZZ_SECONDS");
  return std::chrono::seconds(text ? std::strtol(text, nullptr, 10) : 0);
}

/// FSDP2_FUZZ_SEED if set (to repeat a failure); else fixed in an ordinary run, new in a long one.
inline unsigned first_seed() {
  if (const char* text = std::getenv("FSDP2_FUZZ_SEED"))
    return static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  return fuzz_time().count() > 0 ? std::random_device{}() % 1000000 : 1;
}

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  /// 0 .. n-1
  int upto(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return upto(n) == 0; }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

}  // namespace fsdp2::testing
