#pragma once

// What fuzz targets require, beyond not to crash.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sanitizer/allocator_interface.h>

namespace fsdp2::fuzz {

/// Ends the process, which keeps the input, unless `holds`.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

/// From here to the end of the scope, the process allocates at most a few MiB and `multiple` times
/// the input's size at any one time.
class MemoryBound {
 public:
  MemoryBound(size_t input, int64_t multiple)
      : most_(kAtLeast + multiple * static_cast<int64_t>(input)) {
    static const int hooked = __sanitizer_install_malloc_and_free_hooks(&on_malloc, &on_free);
    require(hooked > 0, "allocations cannot be counted");
    start_ = live;
    peak = start_;
  }
  ~MemoryBound() { require(peak - start_ <= most_, "it allocated too much"); }
  MemoryBound(const MemoryBound&) = delete;
  MemoryBound& operator=(const MemoryBound&) = delete;

 private:
  static constexpr int64_t kAtLeast = int64_t{4} * 1024 * 1024;

  static void on_malloc(const volatile void* /*memory*/, size_t size) {
    peak = std::max(peak, live += static_cast<int64_t>(size));
  }
  static void on_free(const volatile void* memory) {
    if (memory == nullptr) return;
    live -= static_cast<int64_t>(
        __sanitizer_get_allocated_size(const_cast<const void*>(memory)));  // NOLINT
  }

  // Of the thread that reads.
  static inline thread_local int64_t live = 0, peak = 0;
  int64_t start_ = 0, most_;
};

}  // namespace fsdp2::fuzz
