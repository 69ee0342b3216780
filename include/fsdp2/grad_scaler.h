#pragma once

// GradScaler: loss scaling for float16. Follows torch.amp.GradScaler
// (pytorch.org/docs/stable/amp.html#gradient-scaling) and its sharded form.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);            // only if gradients are looked at or clipped
//   clip_grad_norm_(parameters, 1.0);
//   scaler.step(optimizer);                // skipped, on all ranks, if some gradient is not finite
//   scaler.update();

#include <fsdp2/device_mesh.h>

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <optional>
#include <unordered_map>

namespace fsdp2 {

namespace optim {
class AdamW;
}

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     // after growth_interval updates in a row without a skipped step
  double backoff_factor = 0.5;  // after a skipped step
  int64_t growth_interval = 2000;
  bool enabled = true;  // false: scale() and unscale_() do nothing, step() steps
  /// The ranks that step together. Not given: the world, if there is one.
  DeviceMesh mesh{};
};

/// Not thread-safe.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// loss * get_scale(), in at least float32.
  torch::Tensor scale(const torch::Tensor& loss) const;
  /// Divides the gradients of the optimizer's parameters by the scale, and finds out whether all of
  /// all ranks are finite. Collective: one all-reduce of two numbers. Error if it was called since
  /// the last update(), or if no parameter has a gradient on any rank.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// unscale_() if that has not been done; then optimizer.step() if all gradients were finite.
  /// Returns whether it stepped, the same on all ranks. Error if called twice before update().
  /// An optim::AdamW whose gradients are still scaled divides them in its own kernel, in float32
  /// whatever their dtype: they are only looked at here, and stay scaled if the step is skipped.
  bool step(torch::optim::Optimizer& optimizer);
  /// Adapts the scale, or sets it; once after the steps of all optimizers. Error if there was none.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const { return options_.enabled ? state_.scale : 1; }

  /// What a checkpoint has to keep.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0;
  };
  State state() const { return state_; }
  void load_state(const State& state);

 private:
  struct Progress {
    bool finite = true, stepped = false;
  };

  bool step_scaled(optim::AdamW& optimizer);

  GradScalerOptions options_;
  State state_;
  std::unordered_map<torch::optim::Optimizer*, Progress> optimizers_;  // since the last update
};

}  // namespace fsdp2
