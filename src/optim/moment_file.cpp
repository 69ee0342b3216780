#include "optim/moment_file.h"

#include <fsdp2/process_group.h>

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace fsdp2::optim {
namespace {

constexpr int64_t kPage = 4096;

std::string file_name(const std::string& folder) {
  static std::atomic<int> made = 0;
  return folder + "/moments-rank" + std::to_string(get_rank()) + "-" + std::to_string(getpid()) +
         "-" + std::to_string(made++);
}

}  // namespace

MomentFile::MomentFile(const NvmeOffloadPolicy& policy) : name_(file_name(policy.path)) {
  file_ = open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  TORCH_CHECK(file_ >= 0, "nvme_offload: cannot make the file ", name_, ": ", std::strerror(errno));
  // Without a name it is gone when the last mapping is, however the process ends.
  if (!policy.keep_files) unlink(name_.c_str());
}

MomentFile::~MomentFile() { close(file_); }

torch::Tensor MomentFile::allocate(const torch::Tensor& like) {
  if (like.numel() == 0) return torch::zeros_like(like);
  const auto bytes = static_cast<size_t>(like.nbytes());
  const int64_t length = (static_cast<int64_t>(bytes) + kPage - 1) / kPage * kPage;
  // Blocks are taken now: a full disk found later would be a SIGBUS.
  const int full = posix_fallocate(file_, size_, length);
  TORCH_CHECK(full == 0, "nvme_offload: cannot make the file ", name_, " ", size_ + length,
              " bytes long: ", std::strerror(full));
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, size_);
  TORCH_CHECK(data != MAP_FAILED, "nvme_offload: cannot map the file ", name_, ": ",
              std::strerror(errno));
  regions_[data] = {size_, bytes};
  size_ += length;
  return torch::from_blob(
      data, like.sizes(), like.strides(), [bytes](void* mapped) { munmap(mapped, bytes); },
      torch::TensorOptions().dtype(like.dtype()));
}

void MomentFile::prefetch(const torch::Tensor& tensor) const {
  const auto found = regions_.find(tensor.data_ptr());
  if (found == regions_.end()) return;
  madvise(tensor.data_ptr(), found->second.bytes, MADV_WILLNEED);
}

void MomentFile::release(const torch::Tensor& tensor) const {
  const auto found = regions_.find(tensor.data_ptr());
  if (found == regions_.end()) return;
  const auto& [offset, bytes] = found->second;
  madvise(tensor.data_ptr(), bytes, MADV_DONTNEED);  // the file has them; dirty pages are written
  sync_file_range(file_, offset, static_cast<off64_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

}  // namespace fsdp2::optim
