#pragma once

// Tensors of an optimizer's state in a memory-mapped file.

#include <fsdp2/nvme_offload.h>

#include <torch/types.h>

#include <string>
#include <unordered_map>

namespace fsdp2::optim {

class MomentFile {
 public:
  /// Makes the file. Error naming the path if that cannot be done.
  explicit MomentFile(const NvmeOffloadPolicy& policy);
  MomentFile(const MomentFile&) = delete;
  MomentFile& operator=(const MomentFile&) = delete;
  ~MomentFile();

  /// Zeros in the file, as large and strided as `like`, a dense tensor. Error naming the path if
  /// the disk is full.
  torch::Tensor allocate(const torch::Tensor& like);
  bool holds(const torch::Tensor& tensor) const { return regions_.count(tensor.data_ptr()) != 0; }
  /// Starts reading; returns at once.
  void prefetch(const torch::Tensor& tensor) const;
  /// Starts writing, and takes the pages out of this process's memory.
  void release(const torch::Tensor& tensor) const;

 private:
  struct Region {
    int64_t offset = 0;
    size_t bytes = 0;
  };

  std::string name_;
  int file_ = -1;
  int64_t size_ = 0;
  std::unordered_map<const void*, Region> regions_;
};

}  // namespace fsdp2::optim
