// What torch.save writes: an item of a checkpoint, or a file of its own.

#include "checkpoint/archive.h"

#include "checkpoint/file_io.h"
#include "checkpoint/objects.h"
#include "fuzz/memory_file.h"

#include <fsdp2/dcp.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

namespace fsdp2::fuzz {
namespace {

/// Nothing if reading is an error.
template <class Read>
auto read(const MemoryFile& bytes, const Read& read_file)
    -> std::optional<decltype(read_file(std::declval<const files::ReadFile&>()))> {
  const files::ReadFile file(bytes.path());
  const MemoryBound bound(file.size(), 2000);  // values may take 1000
  try {
    return read_file(file);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::string text_of(const std::function<void(const dcp::Sink&)>& write) {
  std::string text;
  write([&](const void* data, size_t size) { text.append(static_cast<const char*>(data), size); });
  return text;
}

/// A torch.save file whose value is a tensor.
std::optional<torch::Tensor> read_tensor(const MemoryFile& bytes) {
  const auto value =
      read(bytes, [](const files::ReadFile& file) { return dcp::read_torch_file(file.path()); });
  if (!value || !value->is_tensor()) return std::nullopt;
  return value->to_tensor();
}

/// Whether the last element that sizes and strides reach has its bytes.
bool has_bytes(const dcp::StoredTensor& tensor) {
  __extension__ using Wide = unsigned __int128;
  const auto element = static_cast<Wide>(c10::elementSize(tensor.dtype));
  Wide end = static_cast<Wide>(tensor.storage_offset) + 1;
  if (std::count(tensor.sizes.begin(), tensor.sizes.end(), 0) > 0) return true;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    end += static_cast<Wide>(tensor.sizes[i] - 1) * static_cast<Wide>(tensor.strides[i]);
    if (end * element > tensor.data.size) return false;
  }
  return end * element <= tensor.data.size;
}

void check_tensor(const MemoryFile& input) {
  const auto stored = read(input, [](const files::ReadFile& file) {
    return dcp::read_stored_tensor(file, 0, file.size());
  });
  require(!stored || has_bytes(*stored), "a tensor reaches beyond its bytes");
  const auto tensor = read_tensor(input);
  require(!tensor || (stored && tensor->sizes() == stored->sizes &&
                      tensor->scalar_type() == stored->dtype),
          "an item and a file of the same bytes differ");
  constexpr int64_t most = 1'000'000;  // of one element, strides make as many as they say
  if (!tensor || tensor->numel() > most || !tensor->is_contiguous()) return;
  const MemoryFile copy(text_of([&](const auto& sink) { dcp::write_tensor(*tensor, sink); }));
  const auto again = read_tensor(copy);
  require(
      again && again->sizes() == tensor->sizes() && again->scalar_type() == tensor->scalar_type() &&
          (tensor->nbytes() == 0 ||
           std::memcmp(again->const_data_ptr(), tensor->const_data_ptr(), tensor->nbytes()) == 0),
      "a tensor is not what was written of it");
}

void check_object(const MemoryFile& input) {
  const auto read_object = [](const files::ReadFile& file) {
    return dcp::read_object(file, 0, file.size());
  };
  const auto value = read(input, read_object);
  if (!value) return;
  const std::string bytes = text_of([&](const auto& sink) { dcp::write_object(*value, sink); });
  const auto again = read(MemoryFile(bytes), read_object);
  require(again && bytes == text_of([&](const auto& sink) { dcp::write_object(*again, sink); }),
          "an object is not what was written of it");
}

}  // namespace
}  // namespace fsdp2::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT
  const fsdp2::fuzz::MemoryFile input(data, size);
  fsdp2::fuzz::check_tensor(input);
  fsdp2::fuzz::check_object(input);
  return 0;
}
