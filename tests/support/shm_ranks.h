#pragma once

// on_ranks over backend "shm", whatever FSDP2_SHARED_MEMORY says.

#include "support/ranks.h"

#include <cstdlib>
#include <string>

namespace fsdp2::testing {

inline void on_shm_ranks(int world, const std::function<void(int rank)>& body,
                         std::chrono::seconds limit = std::chrono::seconds(60)) {
  const char* before = std::getenv("FSDP2_SHARED_MEMORY");
  const std::string kept = before ? before : "";
  setenv("FSDP2_SHARED_MEMORY", "on", 1);
  on_ranks(world, body, limit);
  if (before) setenv("FSDP2_SHARED_MEMORY", kept.c_str(), 1);
  if (!before) unsetenv("FSDP2_SHARED_MEMORY");
}

}  // namespace fsdp2::testing
