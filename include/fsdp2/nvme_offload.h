#pragma once

// Where an optimizer may keep its state instead of in memory.

#include <string>

namespace fsdp2 {

struct NvmeOffloadPolicy {
  /// A folder on a local disk that is there already. Each rank makes one file in it.
  std::string path;
  /// False: the file has no name from the start, so nothing stays behind however the process ends.
  bool keep_files = false;
};

}  // namespace fsdp2
