#pragma once

// Safetensors files (github.com/huggingface/safetensors): a JSON header and the raw bytes of named
// tensors. Reading maps the file and never runs anything from it; writing goes tensor by tensor, so
// that no one needs to hold all of them, into a temporary file that commit() renames into place.

#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp2::safetensors {

struct Entry {
  std::string name;
  torch::ScalarType dtype = torch::kFloat32;
  std::vector<int64_t> sizes;
};
using Metadata = std::map<std::string, std::string>;

class Reader {
 public:
  /// Maps `path` and checks its header. Errors name the file and what is wrong with it.
  explicit Reader(const std::string& path);

  /// In the order of their bytes in the file.
  const std::vector<Entry>& entries() const;
  const Metadata& metadata() const;
  bool contains(const std::string& name) const;
  /// The tensor, over the mapped bytes: pages are read when they are touched, writes stay private
  /// to this process, and it may outlive the reader. Error naming the file if there is none such.
  torch::Tensor read(const std::string& name) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

class Writer {
 public:
  /// Opens `path`.tmp and writes the header. Error if two entries share a name or a dtype has no
  /// safetensors name.
  Writer(const std::string& path, const std::vector<Entry>& entries, const Metadata& metadata = {});
  /// Without commit(): removes the temporary file.
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  /// The next entry's bytes. Error if size or dtype are not that entry's.
  void write(const torch::Tensor& tensor);
  /// Flushes to the disk and renames into place. Error if entries are missing.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The tensors as one file.
void save(const std::string& path,
          const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
          const Metadata& metadata = {});

}  // namespace fsdp2::safetensors
