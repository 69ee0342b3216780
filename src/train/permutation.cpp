#include "train/permutation.h"

#include "train/random.h"

#include <c10/util/Exception.h>

#include <bit>

namespace fsdp2::train {

// A Feistel network over the smallest even number of bits that holds `size`; results outside are
// sent through again.
uint64_t permute(uint64_t index, uint64_t size, uint64_t key) {
  TORCH_CHECK_INDEX(index < size, "permute: ", index, " is not below ", size);
  constexpr int kRounds = 4;
  const int half = (std::bit_width(size - 1) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = index >> half, right = index & mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (mix64(right + key + round * kGolden) & mask);
      left = right;
      right = next;
    }
    index = (left << half) | right;
  } while (index >= size);
  return index;
}

}  // namespace fsdp2::train
