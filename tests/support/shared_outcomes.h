#pragma once

// One number from every rank's process, for the test that started them.

#include <algorithm>
#include <iostream>
#include <sys/mman.h>
#include <unistd.h>

namespace fsdp2::testing {

/// Make one before on_ranks. -1 where a rank said nothing.
class SharedOutcomes {
 public:
  explicit SharedOutcomes(int ranks) : ranks_(ranks) {
    values_ = static_cast<double*>(
        mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    std::fill_n(values_, ranks_, -1.0);
  }
  SharedOutcomes(const SharedOutcomes&) = delete;
  SharedOutcomes& operator=(const SharedOutcomes&) = delete;
  ~SharedOutcomes() { munmap(values_, bytes()); }

  void set(int rank, double value) { values_[rank] = value; }
  double get(int rank) const { return values_[rank]; }
  int count(double value) const {
    return static_cast<int>(std::count(values_, values_ + ranks_, value));
  }
  /// Ends a rank whose world is broken, as a success.
  [[noreturn]] static void leave() {
    std::cout.flush();
    std::cerr.flush();
    _exit(0);
  }

 private:
  size_t bytes() const { return sizeof(double) * static_cast<size_t>(ranks_); }
  int ranks_;
  double* values_;
};

}  // namespace fsdp2::testing
