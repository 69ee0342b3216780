#include "checkpoint/mapped_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace fsdp2::files {

MappedFile::MappedFile(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "cannot open ", path, ": ", std::strerror(errno));
  struct stat status{};
  const bool known = ::fstat(file, &status) == 0;
  void* bytes = nullptr;
  if (known && S_ISREG(status.st_mode) && status.st_size > 0) {
    size_ = static_cast<size_t>(status.st_size);
    bytes = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  }
  const int error = errno;
  ::close(file);
  TORCH_CHECK(known, "cannot read ", path, ": ", std::strerror(error));
  TORCH_CHECK(S_ISREG(status.st_mode), "cannot read ", path, ": not a regular file");
  TORCH_CHECK(bytes != MAP_FAILED, "cannot map ", path, ": ", std::strerror(error));
  data_ = static_cast<char*>(bytes);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace fsdp2::files
