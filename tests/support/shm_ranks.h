#pragma once

// on_ranks over backend "shm", whatever FSDP2_CPU_BACKEND says.

#include "support/ranks.h"

#include <cstdlib>
#include <string>

namespace fsdp2::testing {

inline void on_shm_ranks(int world, const std::function<void(int rank)>& body,
                         std::chrono::seconds limit = std::chrono::seconds(60)) {
  const char* before = std::getenv("FSDP2_CPU_BACKEND");
  const std::string kept = before ? before : "";
  setenv("FSDP2_CPU_BACKEND", "shm", 1);
  on_ranks(world, body, limit);
  if (before) setenv("FSDP2_CPU_BACKEND", kept.c_str(), 1);
  if (!before) unsetenv("FSDP2_CPU_BACKEND");
}

}  // namespace fsdp2::testing
