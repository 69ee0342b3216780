#pragma once

#include <cstddef>
#include <string>

namespace fsdp2::files {

/// A file's bytes in memory. Writes are private to the process and never reach the file. Errors
/// name the file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  char* data() const { return data_; }  // null when empty
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fsdp2::files
