#pragma once

// What collective_counts() counts, for collectives whose bytes move in another way than through a
// process group.

#include <fsdp2/collectives.h>

namespace fsdp2::comm {

void count_collective(int64_t CollectiveCounts::* kind, int64_t bytes);

/// While one lives, this thread's collectives are not counted: they are part of another, or set
/// something up.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace fsdp2::comm
