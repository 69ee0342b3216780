#include "comm/trace_range.h"
#include "optim/parts.h"

#include <fsdp2/clip_grad.h>
#include <fsdp2/collectives.h>

#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace fsdp2 {
namespace {

using optim::Lists;
using torch::Tensor;

/// Of the norm's order: the sum of powers, or the maximum and whether something is not a number.
struct Power {
  double order;
  double value = 0;
  bool nan = false;

  void add(double norm) {
    if (std::isinf(order)) {
      nan = nan || std::isnan(norm);
      value = std::max(value, norm);
    } else {
      value += order == 2 ? norm * norm : std::pow(norm, order);
    }
  }
  void add(const Power& other) {
    if (!std::isinf(order)) value += other.value;
    nan = nan || other.nan;
    value = std::max(value, other.value);
  }
  double norm() const {
    if (nan) return std::numeric_limits<double>::quiet_NaN();
    if (std::isinf(order)) return value;
    return order == 2 ? std::sqrt(value) : std::pow(value, 1 / order);
  }
};

/// The gradients that lie on one mesh (none: plain ones, and those whole on every rank).
struct OnMesh {
  DeviceMesh mesh;
  std::vector<bool> reduced;  // along which of its dimensions something is sharded
  std::vector<std::pair<Tensor, Placements>> gradients;

  void add(const Tensor& part, const Placements& placements) {
    gradients.emplace_back(part, placements);
    reduced.resize(placements.size());
    for (size_t dim = 0; dim < placements.size(); ++dim) {
      if (placements[dim].is_shard()) reduced[dim] = true;
    }
  }
  /// Of equal parts along a dimension that will be reduced, one rank's counts.
  bool counts(const Placements& placements) const {
    for (size_t dim = 0; dim < placements.size(); ++dim) {
      const bool copies = reduced[dim] && !placements[dim].is_shard();
      if (copies && mesh.get_local_rank(static_cast<int64_t>(dim)) != 0) return false;
    }
    return true;
  }
};

Power local_power(const OnMesh& on, double order) {
  Lists lists;
  for (const auto& [part, placements] : on.gradients) {
    if (part.numel() > 0 && on.counts(placements)) lists[optim::kind_of(part)].push_back(part);
  }
  Power power{.order = order};
  for (const auto& [kind, list] : lists) {
    const auto dtype = std::get<2>(kind);
    const bool narrow = dtype == torch::kHalf || dtype == torch::kBFloat16;
    const auto norms =
        narrow ? at::_foreach_norm(list, order, torch::kFloat) : at::_foreach_norm(list, order);
    const Tensor all = torch::stack(norms).to(torch::kCPU, torch::kDouble);
    for (int64_t i = 0; i < all.numel(); ++i) power.add(all.const_data_ptr<double>()[i]);
  }
  return power;
}

void reduce(Power& power, const OnMesh& on) {
  const bool max = std::isinf(power.order);
  for (size_t dim = 0; dim < on.reduced.size(); ++dim) {
    const auto index = static_cast<int64_t>(dim);
    if (!on.reduced[dim] || on.mesh.size(index) == 1) continue;
    Tensor pair =
        torch::tensor({power.value, power.nan ? 1.0 : 0.0}, torch::kDouble).to(on.mesh.device());
    const comm::TraceRange range("fsdp2::wait norm");
    wait(all_reduce(pair, max ? ReduceOp::kMax : ReduceOp::kSum, on.mesh.get_group(index)),
         "the norm of gradients");
    pair = pair.cpu();
    power.value = pair[0].item<double>();
    power.nan = pair[1].item<double>() > 0;
  }
}

std::vector<OnMesh> by_mesh(const std::vector<Tensor>& gradients) {
  std::vector<OnMesh> all(1);
  for (const Tensor& gradient : gradients) {
    TORCH_CHECK(gradient.layout() == torch::kStrided || is_dtensor(gradient),
                "clip_grad_norm_: a gradient of ", gradient.sizes(), " is ", gradient.layout(),
                ": make it dense");
    if (!is_dtensor(gradient)) {
      all[0].add(gradient, {});
      continue;
    }
    const dtensor::Spec& spec = *dtensor::spec_of(gradient);
    TORCH_CHECK(!spec.partial, "clip_grad_norm_: a gradient of ", gradient.sizes(), " is ",
                to_string(spec.placements), ", which is not reduced yet: redistribute() it");
    if (spec.replicated) {
      all[0].add(local_part(gradient), {});
      continue;
    }
    auto found = std::find_if(all.begin() + 1, all.end(),
                              [&](const OnMesh& on) { return on.mesh == spec.mesh; });
    if (found == all.end()) {
      all.push_back({.mesh = spec.mesh, .reduced = {}, .gradients = {}});
      found = all.end() - 1;
    }
    found->add(local_part(gradient), spec.placements);
  }
  return all;
}

void scale(const std::vector<Tensor>& gradients, double factor) {
  Lists lists;
  for (const Tensor& gradient : gradients) {
    const Tensor& part = optim::written_part_of(gradient);
    if (part.numel() > 0) lists[optim::kind_of(part)].push_back(part);
  }
  for (auto& [kind, list] : lists) at::_foreach_mul_(list, factor);
}

}  // namespace

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(max_norm >= 0, "clip_grad_norm_: max_norm must not be negative, got ",
                    max_norm);
  TORCH_CHECK_VALUE(norm_type > 0, "clip_grad_norm_: norm_type must be positive, got ", norm_type);
  const comm::TraceRange range("fsdp2::clip_grad_norm_");
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  Power total{.order = norm_type};
  for (const OnMesh& on : by_mesh(gradients)) {
    Power power = local_power(on, norm_type);
    reduce(power, on);
    total.add(power);
  }
  const double norm = total.norm();
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm), "clip_grad_norm_: the norm of order ",
              norm_type, " of all gradients is ", norm,
              ", so they cannot be clipped. Pass error_if_nonfinite = false to scale them anyway");
  const double factor = max_norm / (norm + 1e-6);
  if (std::isfinite(max_norm) && !(factor >= 1)) scale(gradients, factor);
  return norm;
}

}  // namespace fsdp2
