#pragma once

#include <fsdp2/dcp_metadata.h>

#include <string>

namespace fsdp2::dcp {

/// The bytes of a `.metadata` file that torch.distributed.checkpoint reads.
std::string encode(const Metadata& metadata);
/// Error, starting with `file`, if the bytes are not that.
Metadata decode(const std::string& bytes, const std::string& file);

}  // namespace fsdp2::dcp
