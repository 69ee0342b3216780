#pragma once

// Reading and writing whole files and parts of them. Errors name the file and what the system says.

#include "checkpoint/storage.h"

#include <cstdint>
#include <future>
#include <memory>
#include <string>

namespace fsdp2::files {

/// A file open for reading. Thread-safe.
class ReadFile final : public Readable {
 public:
  explicit ReadFile(std::string path);
  ~ReadFile() override;

  const std::string& path() const override { return path_; }
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* to, uint64_t count) const override;

 private:
  std::string path_;
  int file_ = -1;
  uint64_t size_ = 0;
};

/// A new file, written front to back. What was not sync()ed may be lost with the machine.
class WriteFile {
 public:
  /// Error if there is one of that name already.
  explicit WriteFile(std::string path);
  ~WriteFile();
  WriteFile(const WriteFile&) = delete;
  WriteFile& operator=(const WriteFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  /// Copies the bytes; the disk works on them while the caller goes on. Errors of the disk may come
  /// from a later call.
  void write(const void* data, uint64_t count);
  /// Everything to the disk, and closes the file.
  void sync();

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  using Buffer = std::unique_ptr<char, Free>;

  static Buffer new_buffer();
  void send();
  void write_through(const char* data, uint64_t count);
  void bypass_cache(bool bypass);

  std::string path_;
  int file_ = -1;
  uint64_t size_ = 0, filled_ = 0;
  bool direct_ = false;
  Buffer buffer_, sent_;
  std::future<void> sending_;
};

std::string read_all(const std::string& path);
/// Writes `path`.tmp, flushes it to the disk and renames it: `path` is the old file or the new one,
/// never a part.
void replace(const std::string& path, const std::string& bytes);
/// Names in a folder become durable.
void sync_folder(const std::string& path);

}  // namespace fsdp2::files
