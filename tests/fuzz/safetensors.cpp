// A safetensors file: its header, and where that says that bytes are.

#include "fuzz/memory_file.h"
#include "support/temporary_folder.h"

#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <cstring>
#include <optional>

namespace {

using fsdp2::safetensors::Reader;

std::optional<Reader> read(const std::string& path, size_t size) {
  const fsdp2::fuzz::MemoryBound bound(size, 600);
  try {
    return Reader(path);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

bool same(const Reader& a, const Reader& b) {
  if (a.metadata() != b.metadata() || a.entries().size() != b.entries().size()) return false;
  for (size_t i = 0; i < a.entries().size(); ++i) {
    const auto &left = a.entries()[i], &right = b.entries()[i];
    if (left.name != right.name) return false;
    const torch::Tensor x = a.read(left.name), y = b.read(right.name);
    if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type()) return false;
    if (x.nbytes() > 0 && std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT
  const fsdp2::fuzz::MemoryFile input(data, size);
  const auto reader = read(input.path(), size);
  if (!reader) return 0;
  static const fsdp2::testing::TemporaryFolder folder;
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  tensors.reserve(reader->entries().size());
  uint64_t bytes = 0;
  std::memcpy(&bytes, data, sizeof(bytes));
  bytes += sizeof(bytes);
  for (const auto& entry : reader->entries()) {
    tensors.emplace_back(entry.name, reader->read(entry.name));
    bytes += tensors.back().second.nbytes();
  }
  fsdp2::fuzz::require(bytes == size, "header and tensors are not all of the file");
  fsdp2::safetensors::save(folder.path("copy"), tensors, reader->metadata());
  fsdp2::fuzz::require(same(*reader, Reader(folder.path("copy"))),
                       "what it reads it does not write and read again");
  return 0;
}
