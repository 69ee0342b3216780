#include "comm/trace_range.h"
#include "optim/moment_file.h"
#include "optim/parts.h"

#include <fsdp2/optim.h>

#include <torch/torch.h>

namespace fsdp2::optim {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

/// The arguments of one fused call. The kernel walks memory, so all tensors of a parameter must lie
/// as its first: those that do not are copied, and copied back.
class FusedCall {
 public:
  /// With a scale, gradients are divided by it and left so.
  explicit FusedCall(std::optional<double> grad_scale) : grad_scale_(grad_scale) {}

  void add(const Tensor& parameter, AdamWParamState& state, bool amsgrad) {
    const Tensor part = as_real(part_of(parameter));
    leader_ = part.is_non_overlapping_and_dense() ? part : part.contiguous();
    add_written(parameters_, part);
    const Tensor gradient = as_real(part_of(parameter.grad()));
    if (grad_scale_) {
      add_written(gradients_, gradient);
    } else {
      gradients_.push_back(laid_out(gradient));
    }
    add_written(exp_avgs_, as_real(written_part_of(state.exp_avg())));
    add_written(exp_avg_sqs_, as_real(written_part_of(state.exp_avg_sq())));
    if (amsgrad) add_written(max_exp_avg_sqs_, as_real(written_part_of(state.max_exp_avg_sq())));
  }

  void run(const AdamWOptions& options, int64_t step, bool maximize) {
    // Read, not written: one for all.
    const auto scalar = [&](double value) {
      return torch::full({}, value, parameters_.front().options().dtype(torch::kFloat));
    };
    const Tensor count = scalar(static_cast<double>(step));
    const std::vector<Tensor> steps(parameters_.size(), count);
    const auto& [beta1, beta2] = options.betas();
    at::_fused_adamw_(parameters_, gradients_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, steps,
                      options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                      options.amsgrad(), maximize,
                      grad_scale_ ? std::optional(scalar(*grad_scale_)) : std::nullopt);
    for (const auto& [part, copy] : written_back_) part.copy_(copy);
  }

 private:
  static Tensor as_real(const Tensor& tensor) {
    return tensor.is_complex() ? torch::view_as_real(tensor) : tensor;
  }
  Tensor laid_out(const Tensor& tensor) const {
    if (tensor.strides() == leader_.strides()) return tensor;
    return torch::empty_strided(leader_.sizes(), leader_.strides(), tensor.options()).copy_(tensor);
  }
  void add_written(std::vector<Tensor>& list, const Tensor& part) {
    list.push_back(laid_out(part));
    if (!list.back().is_same(part)) written_back_.emplace_back(part, list.back());
  }

  const std::optional<double> grad_scale_;
  Tensor leader_;
  std::vector<Tensor> parameters_, gradients_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_;
  std::vector<std::pair<Tensor, Tensor>> written_back_;
};

void check_gradient(const Tensor& parameter, size_t group, size_t index) {
  const Tensor& gradient = parameter.grad();
  const auto where = [&] { return c10::str(" of parameter ", index, " in group ", group); };
  TORCH_CHECK(!gradient.is_sparse(), "AdamW: the gradient", where(), " is sparse: make it dense");
  TORCH_CHECK(is_dtensor(parameter) == is_dtensor(gradient), "AdamW: the gradient", where(), " is ",
              is_dtensor(gradient) ? "a DTensor but the parameter is not"
                                   : "plain but the parameter is a DTensor");
  TORCH_CHECK(!is_dtensor(parameter) ||
                  dtensor::same(dtensor::spec_of(parameter), dtensor::spec_of(gradient)),
              "AdamW: the gradient", where(), " is laid out over the mesh in another way than the ",
              "parameter: redistribute() it");
}

/// Where the moments of a parameter begin.
Tensor zeros_for(const Tensor& parameter, MomentFile* file) {
  if (!file) return torch::zeros_like(parameter);
  const Tensor& part = part_of(parameter);
  TORCH_CHECK(part.is_cpu(), "AdamW: nvme_offload is for parameters on the CPU, but one is on ",
              part.device());
  const Tensor zeros =
      file->allocate(part.is_non_overlapping_and_dense() ? part : part.contiguous());
  if (!is_dtensor(parameter)) return zeros;
  const auto& spec = *dtensor::spec_of(parameter);
  return make_dtensor(zeros, spec.mesh, spec.placements, parameter.sizes());
}

void make_moment(Tensor& moment, const Tensor& parameter, MomentFile* file) {
  const bool elsewhere =
      file && moment.defined() && part_of(moment).numel() > 0 && !file->holds(part_of(moment));
  if (moment.defined() && !elsewhere) return;
  const Tensor loaded = moment;
  moment = zeros_for(parameter, file);
  if (elsewhere) part_of(moment).copy_(part_of(loaded));
}

std::vector<Tensor> moments_of(const AdamWParamState& state) {
  std::vector<Tensor> moments = {part_of(state.exp_avg()), part_of(state.exp_avg_sq())};
  if (state.max_exp_avg_sq().defined()) moments.push_back(part_of(state.max_exp_avg_sq()));
  return moments;
}

}  // namespace

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const AdamWOptions& defaults, AdamWExtras extras)
    : torch::optim::AdamW(groups, defaults), extras_(std::move(extras)) {
  if (extras_.nvme_offload) file_ = std::make_shared<MomentFile>(*extras_.nvme_offload);
}

AdamW::AdamW(std::vector<Tensor> parameters, const AdamWOptions& defaults, AdamWExtras extras)
    : AdamW({OptimizerParamGroup(std::move(parameters))}, defaults, std::move(extras)) {}

AdamWParamState& AdamW::state_of(const Tensor& parameter, bool amsgrad) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<AdamWParamState>();
  auto& known = static_cast<AdamWParamState&>(*state);
  make_moment(known.exp_avg(), parameter, file_.get());
  make_moment(known.exp_avg_sq(), parameter, file_.get());
  if (amsgrad) make_moment(known.max_exp_avg_sq(), parameter, file_.get());
  return known;
}

void AdamW::step_through_file(OptimizerParamGroup& group) {
  const auto& options = static_cast<const AdamWOptions&>(group.options());
  std::vector<std::pair<Tensor, AdamWParamState*>> used;
  for (const Tensor& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    used.emplace_back(parameter, &state_of(parameter, options.amsgrad()));
  }
  for (size_t i = 0; i < used.size(); ++i) {
    const auto& [parameter, state] = used[i];
    if (i + 1 < used.size()) {
      for (const Tensor& moment : moments_of(*used[i + 1].second)) file_->prefetch(moment);
    }
    state->step(state->step() + 1);
    if (written_part_of(parameter).numel() == 0) continue;
    FusedCall call(grad_scale_);
    call.add(parameter, *state, options.amsgrad());
    call.run(options, state->step(), extras_.maximize);
    for (const Tensor& moment : moments_of(*state)) file_->release(moment);
  }
}

Tensor AdamW::step(LossClosure closure) {
  Tensor loss;
  if (closure) {
    const torch::AutoGradMode enabled(true);
    loss = closure();
  }
  const comm::TraceRange range("fsdp2::optimizer");
  const torch::NoGradGuard no_grad;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    const auto& options = static_cast<const AdamWOptions&>(param_groups_[g].options());
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].grad().defined()) continue;
      check_gradient(parameters[i], g, i);
      state_of(parameters[i], options.amsgrad());
    }
  }
  for (auto& group : param_groups_) {
    if (file_) {
      step_through_file(group);
      continue;
    }
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    std::map<std::pair<Kind, int64_t>, FusedCall> calls;
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      AdamWParamState& state = state_of(parameter, options.amsgrad());
      state.step(state.step() + 1);
      // Every rank writes the parameter, one with an empty part too.
      const Tensor& part = written_part_of(parameter);
      if (part.numel() == 0) continue;
      calls.try_emplace({kind_of(part), state.step()}, grad_scale_)
          .first->second.add(parameter, state, options.amsgrad());
    }
    for (auto& [kind, call] : calls) call.run(options, kind.second, extras_.maximize);
  }
  return loss;
}

}  // namespace fsdp2::optim
