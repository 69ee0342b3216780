#include "optim/parts.h"

#include <fsdp2/optim.h>

#include <torch/torch.h>

namespace fsdp2::optim {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

/// The arguments of one fused call. The kernel walks memory, so all tensors of a parameter must lie
/// as its first: those that do not are copied, and copied back.
class FusedCall {
 public:
  void add(const Tensor& parameter, AdamWParamState& state, bool amsgrad) {
    const Tensor part = as_real(part_of(parameter));
    leader_ = part.is_non_overlapping_and_dense() ? part : part.contiguous();
    add_written(parameters_, part);
    gradients_.push_back(laid_out(as_real(part_of(parameter.grad()))));
    add_written(exp_avgs_, as_real(written_part_of(state.exp_avg())));
    add_written(exp_avg_sqs_, as_real(written_part_of(state.exp_avg_sq())));
    if (amsgrad) add_written(max_exp_avg_sqs_, as_real(written_part_of(state.max_exp_avg_sq())));
  }

  void run(const AdamWOptions& options, int64_t step, bool maximize) {
    // Read, not written: one for all.
    const Tensor count = torch::full({}, static_cast<double>(step),
                                     parameters_.front().options().dtype(torch::kFloat));
    const std::vector<Tensor> steps(parameters_.size(), count);
    const auto& [beta1, beta2] = options.betas();
    at::_fused_adamw_(parameters_, gradients_, exp_avgs_, exp_avg_sqs_, max_exp_avg_sqs_, steps,
                      options.lr(), beta1, beta2, options.weight_decay(), options.eps(),
                      options.amsgrad(), maximize);
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

AdamWParamState& state_in(std::unique_ptr<torch::optim::OptimizerParamState>& state,
                          const Tensor& parameter, bool amsgrad) {
  if (!state) {
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->exp_avg(torch::zeros_like(parameter));
    fresh->exp_avg_sq(torch::zeros_like(parameter));
    state = std::move(fresh);
  }
  auto& known = static_cast<AdamWParamState&>(*state);
  if (amsgrad && !known.max_exp_avg_sq().defined()) {
    known.max_exp_avg_sq(torch::zeros_like(parameter));
  }
  return known;
}

}  // namespace

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const AdamWOptions& defaults, AdamWExtras extras)
    : torch::optim::AdamW(groups, defaults), extras_(std::move(extras)) {}

AdamW::AdamW(std::vector<Tensor> parameters, const AdamWOptions& defaults, AdamWExtras extras)
    : torch::optim::AdamW(std::move(parameters), defaults), extras_(std::move(extras)) {}

Tensor AdamW::step(LossClosure closure) {
  Tensor loss;
  if (closure) {
    const torch::AutoGradMode enabled(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) check_gradient(parameters[i], g, i);
    }
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    std::map<std::pair<Kind, int64_t>, FusedCall> calls;
    for (const Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      AdamWParamState& state =
          state_in(state_[parameter.unsafeGetTensorImpl()], parameter, options.amsgrad());
      state.step(state.step() + 1);
      // Every rank writes the parameter, one with an empty part too.
      const Tensor& part = written_part_of(parameter);
      if (part.numel() == 0) continue;
      calls[{kind_of(part), state.step()}].add(parameter, state, options.amsgrad());
    }
    for (auto& [kind, call] : calls) call.run(options, kind.second, extras_.maximize);
  }
  return loss;
}

}  // namespace fsdp2::optim
