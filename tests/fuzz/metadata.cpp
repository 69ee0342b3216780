// The pickle that is a checkpoint's `.metadata`.

#include "checkpoint/metadata_codec.h"
#include "fuzz/bounds.h"

#include <c10/util/Exception.h>

#include <optional>

namespace {

std::optional<fsdp2::dcp::Metadata> read(const std::string& bytes) {
  const fsdp2::fuzz::MemoryBound bound(bytes.size(), 600);
  try {
    return fsdp2::dcp::decode(bytes, "the input");
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT
  const auto metadata = read({reinterpret_cast<const char*>(data), size});
  if (!metadata) return 0;
  const std::string bytes = fsdp2::dcp::encode(*metadata);
  const auto again = read(bytes);
  fsdp2::fuzz::require(again && fsdp2::dcp::encode(*again) == bytes,
                       "what it reads it does not write and read again");
  return 0;
}
