#pragma once

// The checksums of a save, in a file of their own beside the others, which PyTorch does not look
// at: ".checksums.<save id>.json".

#include <fsdp2/dcp_metadata.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace fsdp2::dcp {

struct Checksums {
  uint64_t metadata = 0;  // of the .metadata file
  /// Of the item that starts at this place of this file.
  std::map<std::pair<std::string, uint64_t>, uint64_t> items;
};

std::string checksums_name(const std::string& save_id);
std::string encode(const Checksums& checksums);
/// Nothing if the save left none. Error naming the file if it cannot be read.
std::optional<Checksums> read_checksums(const std::string& folder, const Metadata& metadata);

}  // namespace fsdp2::dcp
