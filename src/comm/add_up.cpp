#include "comm/add_up.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/torch.h>

#include <algorithm>

namespace fsdp2::comm {
namespace {

constexpr int64_t kSumAtOnce = 32 * 1024;  // elements, so that sums stay in the cache

}  // namespace

void add_up(const at::Tensor& out, const std::vector<at::Tensor>& parts) {
  const bool wide = out.scalar_type() == at::kHalf || out.scalar_type() == at::kBFloat16;
  at::parallel_for(0, out.numel(), kSumAtOnce, [&](int64_t from, int64_t to) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t at = from; at < to; at += kSumAtOnce) {
      const int64_t length = std::min(kSumAtOnce, to - at);
      const auto part = [&](size_t rank) { return parts[rank].narrow(0, at, length); };
      const at::Tensor target = out.narrow(0, at, length);
      at::Tensor sum = wide ? part(0).to(at::kFloat) : target;
      if (wide) {
        sum.add_(part(1));
      } else {
        at::add_out(sum, part(0), part(1));
      }
      for (size_t rank = 2; rank < parts.size(); ++rank) sum.add_(part(rank));
      if (wide) target.copy_(sum);
    }
  });
}

}  // namespace fsdp2::comm
