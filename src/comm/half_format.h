#pragma once

// fp16 and bf16 as they lie in memory to fp32 and back (to nearest, ties to even), many at a time.

#include <cstdint>

namespace fsdp2::comm {

struct HalfFormat {
  void (*widen)(const uint16_t* from, float* to, int64_t count);
  /// sums += what `from` holds
  void (*add)(const uint16_t* from, float* sums, int64_t count);
  void (*narrow)(const float* from, uint16_t* to, int64_t count);
};

/// The fastest on this machine; all give the same numbers.
const HalfFormat& bfloat16_format();
const HalfFormat& float16_format();

}  // namespace fsdp2::comm
