#pragma once

#include "fuzz/bounds.h"

#include <cstdint>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace fsdp2::fuzz {

/// A file that is in memory only, and has a path as others.
class MemoryFile {
 public:
  MemoryFile(const void* data, size_t size) : file_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    require(file_ >= 0 && ::write(file_, data, size) == static_cast<ssize_t>(size),
            "a file in memory cannot be made");
  }
  explicit MemoryFile(const std::string& bytes) : MemoryFile(bytes.data(), bytes.size()) {}
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace fsdp2::fuzz
