#include "train/process_stats.h"

#include <fstream>
#include <limits>
#include <string>

namespace fsdp2::train {

MemoryStats memory_stats() {
  MemoryStats stats;
  std::ifstream file("/proc/self/status");
  std::string key;
  while (file >> key) {
    if (key == "VmRSS:") file >> stats.resident;
    if (key == "VmHWM:") file >> stats.peak;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return stats;
}

bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

}  // namespace fsdp2::train
