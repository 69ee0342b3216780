#include "train/tokens.h"

#include <torch/torch.h>

namespace fsdp2::train {

Batch synthetic_batch(uint64_t seed, int64_t micro, int64_t rank, int64_t batch, int64_t seq,
                      int64_t vocab) {
  uint64_t state =
      seed + 1000003 * static_cast<uint64_t>(micro) + 7919 * static_cast<uint64_t>(rank);
  const auto advance = [&state] { state = state * 6364136223846793005 + 1442695040888963407; };
  for (int i = 0; i < 3; ++i) advance();
  auto tokens = torch::empty({batch, seq + 1}, torch::kInt64);
  auto* out = tokens.data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    if (i % 2 == 1) {
      out[i] = (out[i - 1] * 5 + 17) % vocab;
    } else {
      advance();
      const uint64_t u = state >> 33;
      out[i] = static_cast<int64_t>((((u * u) >> 31) * static_cast<uint64_t>(vocab)) >> 31);
    }
  }
  return {tokens.narrow(1, 0, seq).contiguous(), tokens.narrow(1, 1, seq).contiguous()};
}

}  // namespace fsdp2::train
