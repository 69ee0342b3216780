#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fsdp2::train {

double Schedule::at(int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const int64_t length = std::max<int64_t>(1, steps - 1 - warmup);
  const double progress =
      std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(length));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return peak * (final_fraction + (1 - final_fraction) * cosine);
}

}  // namespace fsdp2::train
