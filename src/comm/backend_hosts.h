#pragma once

// For the library's own use of backend "hosts".

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace fsdp2::comm {

/// The host of each rank of the group, if `backend` is "hosts"; else none.
std::vector<std::string> hosts_of_backend(const c10d::Backend& backend);

}  // namespace fsdp2::comm
