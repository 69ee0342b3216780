#include "checkpoint/file_io.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace fsdp2::files {
namespace {

constexpr uint64_t kAtOnce = uint64_t{64} * 1024 * 1024;  // the system takes no more than 2 GiB
constexpr uint64_t kBuffer = uint64_t{8} * 1024 * 1024;
constexpr size_t kPage = 4096;

[[noreturn]] void fail(const char* doing, const std::string& path) {
  const int error = errno;
  TORCH_CHECK(false, "cannot ", doing, " ", path, ": ", std::strerror(error));
}

void sync(int file, const std::string& path) {
  if (::fsync(file) != 0) fail("flush", path);
}

}  // namespace

ReadFile::ReadFile(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) fail("open", path_);
  struct stat status{};
  if (::fstat(file_, &status) != 0) fail("read", path_);
  if (!S_ISREG(status.st_mode)) {
    ::close(file_);
    TORCH_CHECK(false, path_, " is not a regular file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

ReadFile::~ReadFile() {
  if (file_ >= 0) ::close(file_);
}

void ReadFile::read(uint64_t offset, void* to, uint64_t count) const {
  char* at = static_cast<char*>(to);
  while (count > 0) {
    const ssize_t done = ::pread(file_, at, std::min(count, kAtOnce), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("read", path_);
    TORCH_CHECK(done > 0, path_, " is cut short: it ends at byte ", offset, ", ", count,
                " more are wanted");
    at += done;
    offset += static_cast<uint64_t>(done);
    count -= static_cast<uint64_t>(done);
  }
}

WriteFile::WriteFile(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) fail("create", path_);
}

WriteFile::~WriteFile() {
  if (sending_.valid()) sending_.wait();
  if (file_ >= 0) ::close(file_);
}

void WriteFile::Free::operator()(void* memory) const { std::free(memory); }

WriteFile::Buffer WriteFile::new_buffer() {
  Buffer buffer(static_cast<char*>(std::aligned_alloc(kPage, kBuffer)));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

void WriteFile::write(const void* data, uint64_t count) {
  const char* from = static_cast<const char*>(data);
  size_ += count;
  while (count > 0) {
    if (!buffer_) buffer_ = new_buffer();
    const uint64_t part = std::min(count, kBuffer - filled_);
    std::memcpy(buffer_.get() + filled_, from, part);
    filled_ += part;
    from += part;
    count -= part;
    if (filled_ == kBuffer) send();
  }
}

/// Gives a full buffer to the disk; waits for the one before.
void WriteFile::send() {
  if (sending_.valid()) {
    sending_.get();
  } else {
    bypass_cache(true);
    sent_ = new_buffer();
  }
  std::swap(buffer_, sent_);
  filled_ = 0;
  sending_ = std::async(std::launch::async, [this] { write_through(sent_.get(), kBuffer); });
}

/// A checkpoint is larger than what is worth caching, and a page of cache that is touched for the
/// first time costs more than the disk. Not every file system can.
void WriteFile::bypass_cache(bool bypass) {
  const int flags = ::fcntl(file_, F_GETFL);
  direct_ = ::fcntl(file_, F_SETFL, bypass ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && bypass;
}

void WriteFile::write_through(const char* data, uint64_t count) {
  while (count > 0) {
    const ssize_t done = ::write(file_, data, std::min(count, kAtOnce));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EINVAL && direct_) {
      bypass_cache(false);
      continue;
    }
    if (done <= 0) fail("write", path_);
    data += done;
    count -= static_cast<uint64_t>(done);
    if (static_cast<uint64_t>(done) % kPage != 0) bypass_cache(false);
  }
}

void WriteFile::sync() {
  if (sending_.valid()) sending_.get();
  bypass_cache(false);  // the last piece has no block's size
  write_through(buffer_.get(), filled_);
  files::sync(file_, path_);
  if (::close(std::exchange(file_, -1)) != 0) fail("close", path_);
}

std::string read_all(const std::string& path) {
  const ReadFile file(path);
  std::string bytes(file.size(), '\0');
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

void replace(const std::string& path, const std::string& bytes) {
  const std::string temporary = path + ".tmp";
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  WriteFile file(temporary);
  file.write(bytes.data(), bytes.size());
  file.sync();
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail("rename to", path);
  sync_folder(std::filesystem::path(path).parent_path().string());
}

void sync_folder(const std::string& path) {
  const std::string folder = path.empty() ? "." : path;
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail("open", folder);
  const int status = ::fsync(file);
  const int error = errno;
  ::close(file);
  errno = error;
  if (status != 0) fail("flush", folder);
}

}  // namespace fsdp2::files
