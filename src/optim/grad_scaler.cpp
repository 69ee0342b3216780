#include "optim/parts.h"

#include <fsdp2/collectives.h>
#include <fsdp2/grad_scaler.h>
#include <fsdp2/optim.h>

#include <torch/torch.h>

#include <cmath>
#include <typeinfo>

namespace fsdp2 {
namespace {

using torch::Tensor;

/// Divides by the scale; whether there was a gradient, and whether one was not finite.
struct Found {
  bool gradients = false, not_finite = false;
};

/// The parts of all gradients that are to be written, or only read.
optim::Lists gradients_of(const torch::optim::Optimizer& optimizer, bool written, Found& found) {
  optim::Lists lists;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& parameter : group.params()) {
      const Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      TORCH_CHECK(!gradient.is_sparse(), "GradScaler: a gradient of ", parameter.sizes(),
                  " is sparse: make it dense");
      found.gradients = true;
      const Tensor& part = written ? optim::written_part_of(gradient) : optim::part_of(gradient);
      if (part.numel() > 0) lists[optim::kind_of(part)].push_back(part);
    }
  }
  return lists;
}

Found unscale(const torch::optim::Optimizer& optimizer, double scale) {
  Found found;
  for (auto& [kind, list] : gradients_of(optimizer, /*written=*/true, found)) {
    const auto options = list.front().options().dtype(torch::kFloat);
    Tensor found_inf = torch::zeros({1}, options);
    const Tensor inverse = torch::full({1}, 1 / scale, options);
    at::_amp_foreach_non_finite_check_and_unscale_(list, found_inf, inverse);
    found.not_finite = found.not_finite || found_inf.item<float>() != 0;
  }
  return found;
}

/// The same, but only looks.
Found look(const torch::optim::Optimizer& optimizer) {
  Found found;
  for (const auto& [kind, list] : gradients_of(optimizer, /*written=*/false, found)) {
    std::vector<Tensor> extremes;
    if (std::get<0>(kind) == c10::kCUDA) extremes = at::_foreach_norm(list, INFINITY);
    for (const Tensor& part : list) {
      if (part.is_cuda()) break;
      const Tensor values = part.is_complex() ? torch::view_as_real(part) : part;
      const auto [least, most] = torch::aminmax(values);
      extremes.insert(extremes.end(), {least, most});
    }
    const bool finite = torch::isfinite(torch::stack(extremes)).all().item<bool>();
    found.not_finite = found.not_finite || !finite;
  }
  return found;
}

std::vector<ProcessGroup> groups_of(const DeviceMesh& mesh) {
  std::vector<ProcessGroup> groups;
  if (!mesh.defined()) {
    if (is_initialized()) groups.push_back(world_group());
    return groups;
  }
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) groups.push_back(mesh.get_group(dim));
  return groups;
}

Found agreed(const Found& mine, const DeviceMesh& mesh) {
  const auto groups = groups_of(mesh);
  if (groups.empty()) return mine;
  Tensor pair = torch::tensor({mine.gradients ? 1 : 0, mine.not_finite ? 1 : 0}, torch::kInt)
                    .to(mesh.defined() ? mesh.device() : get_device());
  for (const auto& group : groups) {
    wait(all_reduce(pair, ReduceOp::kMax, group), "agreement on non-finite gradients");
  }
  pair = pair.cpu();
  return {pair[0].item<int>() != 0, pair[1].item<int>() != 0};
}

void check_used(const Found& found) {
  TORCH_CHECK(
      found.gradients,
      "GradScaler: no parameter of the optimizer has a gradient: call backward() first, and "
      "make the optimizer from the parameters that are trained");
}

void check(double value, bool good, const char* name, const char* rule) {
  TORCH_CHECK_VALUE(good && std::isfinite(value), "GradScaler: ", name, " must be ", rule, ", got ",
                    value);
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)) {
  check(options_.init_scale, options_.init_scale > 0, "init_scale", "positive");
  check(options_.growth_factor, options_.growth_factor > 1, "growth_factor", "above 1");
  check(options_.backoff_factor, options_.backoff_factor > 0 && options_.backoff_factor < 1,
        "backoff_factor", "between 0 and 1");
  check(static_cast<double>(options_.growth_interval), options_.growth_interval >= 1,
        "growth_interval", "at least 1");
  state_.scale = options_.init_scale;
}

Tensor GradScaler::scale(const Tensor& loss) const {
  if (!options_.enabled) return loss;
  const bool narrow = loss.scalar_type() == torch::kHalf || loss.scalar_type() == torch::kBFloat16;
  return (narrow ? loss.to(torch::kFloat) : loss) * state_.scale;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  TORCH_CHECK(!optimizers_.count(&optimizer),
              "GradScaler: unscale_() or step() was called for this optimizer since the last "
              "update(): its gradients are not scaled any more");
  const torch::NoGradGuard no_grad;
  const Found found = agreed(unscale(optimizer, state_.scale), options_.mesh);
  check_used(found);
  optimizers_[&optimizer] = {.finite = !found.not_finite};
}

bool GradScaler::step_scaled(optim::AdamW& optimizer) {
  const torch::NoGradGuard no_grad;
  const Found found = agreed(look(optimizer), options_.mesh);
  check_used(found);
  optimizers_[&optimizer] = {.finite = !found.not_finite, .stepped = true};
  if (found.not_finite) return false;
  struct Scaled {
    Scaled(std::optional<double>& slot, double scale) : slot(slot) { slot = scale; }
    Scaled(const Scaled&) = delete;
    Scaled& operator=(const Scaled&) = delete;
    ~Scaled() { slot.reset(); }
    std::optional<double>& slot;
  };
  const Scaled scaled(optimizer.grad_scale_, state_.scale);
  optimizer.step();
  return true;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!optimizers_.count(&optimizer)) {
    // A subclass may look at gradients before it steps.
    auto* fused = dynamic_cast<optim::AdamW*>(&optimizer);
    if (fused && typeid(optimizer) == typeid(optim::AdamW)) return step_scaled(*fused);
    unscale_(optimizer);
  }
  Progress& progress = optimizers_.at(&optimizer);
  TORCH_CHECK(!progress.stepped, "GradScaler: step() was called twice since the last update()");
  progress.stepped = true;
  if (progress.finite) optimizer.step();
  return progress.finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  if (new_scale) check(*new_scale, *new_scale > 0, "new_scale", "positive");
  TORCH_CHECK(new_scale || !optimizers_.empty(),
              "GradScaler: update() needs an unscale_() or step() before it");
  bool finite = true;
  for (const auto& [optimizer, progress] : optimizers_) finite = finite && progress.finite;
  optimizers_.clear();
  if (new_scale) {
    state_.scale = *new_scale;
  } else if (!finite) {
    state_ = {state_.scale * options_.backoff_factor, 0};
  } else if (++state_.growth_tracker == options_.growth_interval) {
    const double grown = state_.scale * options_.growth_factor;
    // Beyond float32 the next scaled loss would be infinite for good.
    const bool fits = grown <= std::numeric_limits<float>::max();
    state_ = {fits ? grown : state_.scale, 0};
  }
}

void GradScaler::load_state(const State& state) {
  check(state.scale, state.scale > 0, "the state's scale", "positive");
  TORCH_CHECK_VALUE(state.growth_tracker >= 0, "GradScaler: the state's growth_tracker is ",
                    state.growth_tracker);
  state_ = state;
}

}  // namespace fsdp2
