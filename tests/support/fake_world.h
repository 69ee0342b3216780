#pragma once

// One rank of a world of any size that is not there, in this process, until the end of the scope.

#include <fsdp2/process_group.h>

namespace fsdp2::testing {

class FakeWorld {
 public:
  FakeWorld(int rank, int size) {
    InitOptions options;
    options.backend = "fake";
    options.rank = rank;
    options.world_size = size;
    init_process_group(options);
  }
  ~FakeWorld() { destroy_process_group(); }
  FakeWorld(const FakeWorld&) = delete;
  FakeWorld& operator=(const FakeWorld&) = delete;
};

}  // namespace fsdp2::testing
