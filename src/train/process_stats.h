#pragma once

#include <cstdint>

namespace fsdp2::train {

/// This process's memory as the kernel counts it, in KiB; zeros where there is no /proc.
struct MemoryStats {
  int64_t resident = 0;
  int64_t peak = 0;  // since the start or the last reset_peak()
};
MemoryStats memory_stats();
/// False if the kernel does not allow it.
bool reset_peak();

}  // namespace fsdp2::train
