#include "checkpoint/file_io.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace fsdp2::files {
namespace {

constexpr uint64_t kCollected = uint64_t{1024} * 1024;
constexpr uint64_t kAtOnce = uint64_t{64} * 1024 * 1024;  // the system takes no more than 2 GiB

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
  if (file_ >= 0) ::close(file_);
}

void WriteFile::write(const void* data, uint64_t count) {
  size_ += count;
  if (pending_.size() + count <= kCollected) {
    pending_.append(static_cast<const char*>(data), count);
    return;
  }
  flush();
  if (count <= kCollected) {
    pending_.assign(static_cast<const char*>(data), count);
  } else {
    write_through(static_cast<const char*>(data), count);
  }
}

void WriteFile::flush() {
  write_through(pending_.data(), pending_.size());
  pending_.clear();
}

void WriteFile::write_through(const char* data, uint64_t count) {
  while (count > 0) {
    const ssize_t done = ::write(file_, data, std::min(count, kAtOnce));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail("write", path_);
    data += done;
    count -= static_cast<uint64_t>(done);
    // The disk works while the rest is prepared, instead of all at the end.
    ::sync_file_range(file_, static_cast<off_t>(started_), done, SYNC_FILE_RANGE_WRITE);
    started_ += static_cast<uint64_t>(done);
  }
}

void WriteFile::sync() {
  flush();
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
