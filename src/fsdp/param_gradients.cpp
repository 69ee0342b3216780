// What a parameter group does with gradients.

#include "comm/exits.h"
#include "comm/trace_range.h"
#include "fsdp/param_group.h"
#include "fsdp/plain_ops.h"
#include "fsdp/stale_gradient.h"

#include <fsdp2/placement.h>

#include <torch/csrc/autograd/variable.h>

namespace fsdp2::fsdp {

bool ParamGroup::trainable() const {
  for (const Param& param : params_) {
    if (param.shard.requires_grad()) return true;
  }
  return false;
}

bool ParamGroup::has_gradients() const {
  if (stage_) return true;
  for (const Param& param : params_) {
    torch::Tensor member = param.lock_member();
    if (member.defined() && member.grad().defined() && !is_stale(member.grad())) return true;
  }
  return false;
}

std::map<torch::ScalarType, std::vector<size_t>> ParamGroup::reduced_together() const {
  std::map<torch::ScalarType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].shard.requires_grad()) by_dtype[params_[i].reduce_dtype].push_back(i);
  }
  return by_dtype;
}

void ParamGroup::stage_gradients() {
  if (!stage_) {
    auto together = reduced_together();
    if (together.size() != 1) return;
    auto& [dtype, params] = *together.begin();
    stage_ = comm_->stage_reduce(std::move(params), dtype, [this] { unstage_gradients(); });
    if (!stage_) return;
  }
  for (size_t i = 0; i < stage_->params().size(); ++i) {
    const Param& param = params_[stage_->params()[i]];
    const torch::Tensor member = param.lock_member();
    if (!member.defined() || param.accumulated.defined()) continue;
    torch::Tensor& gradient = member.mutable_grad();
    if (!gradient.defined() || is_stale(gradient) || gradient.is_sparse()) continue;
    stage_->put(i, gradient.detach());
    gradient.reset();
  }
}

void ParamGroup::unstage_gradients() {
  const std::unique_ptr<ReduceStage> stage = std::move(stage_);
  if (!stage) return;
  for (size_t i = 0; i < stage->params().size(); ++i) {
    torch::Tensor gradient = stage->take(i);
    if (gradient.defined()) params_[stage->params()[i]].accumulated = std::move(gradient);
  }
}

void ParamGroup::start_reduce(uint32_t fingerprint) {
  const comm::TraceRange range(ranges_.reduce);
  const bool partial = keeps_partial_sums();
  const auto together = reduced_together();
  // Parameters may have been frozen since.
  if (stage_ && (together.size() != 1 || together.begin()->second != stage_->params()))
    unstage_gradients();
  std::vector<ReduceInput> inputs(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& param = params_[i];
    torch::Tensor member = param.lock_member();
    torch::Tensor gradient;
    if (member.defined() && !is_stale(member.grad())) {
      gradient = member.grad();
      member.mutable_grad().reset();
    }
    torch::Tensor accumulated = std::exchange(param.accumulated, {});
    if (!param.shard.requires_grad()) continue;
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
    if (accumulated.defined()) {
      PlainOps plain;
      gradient = gradient.defined() ? accumulated.add_(gradient) : accumulated;
    }
    inputs[i] = {i, gradient.defined() ? gradient.detach() : gradient};
    if (!partial) inputs[i].partial = std::exchange(param.partial, {});
  }
  comm::note_doing(reduce_text_);
  for (const auto& [dtype, params] : together) {
    std::vector<ReduceInput> own;
    own.reserve(params.size());
    for (const size_t i : params) own.push_back(std::move(inputs[i]));
    auto reduce = comm_->start_reduce(own,
                                      {.dtype = dtype,
                                       .fingerprint = fingerprint + (partial ? 2U : 0U),
                                       .divide_factor = gradient_divide_factor,
                                       .all_reduce = !partial,
                                       .hook = all_reduce_hook},
                                      std::move(stage_));
    reduces_.push_back({params, partial, std::move(reduce)});
  }
}

void ParamGroup::finish_reduce() {
  const comm::TraceRange range(ranges_.wait_reduce);
  std::vector<PendingReduce> pending = std::move(reduces_);
  reduces_.clear();
  for (PendingReduce& item : pending) {
    Reduce::Result result = item.reduce->finish(reduce_text_);
    TORCH_CHECK(result.agreed,
                "ranks reduced gradients of different parameter groups in one step; "
                "this rank reduced group '",
                name_,
                "'. Every rank must run backward through the "
                "same wrapped modules, in the same order.");
    for (size_t i = 0; i < item.params.size(); ++i) {
      if (result.users[i] == 0) continue;  // unused everywhere: stays undefined everywhere
      Param& param = params_[item.params[i]];
      if (!item.partial) {
        add_gradient(param, std::move(result.gradients[i]));
        continue;
      }
      PlainOps plain;
      param.partial =
          param.partial.defined() ? param.partial + result.gradients[i] : result.gradients[i];
    }
  }
}

void ParamGroup::add_gradient(Param& param, torch::Tensor gradient) {
  at::NoGradGuard no_grad;
  {
    PlainOps plain;
    gradient = gradient.to(policy.shard_device, param.shard_dtype);
  }
  torch::Tensor shard = param.shard;
  torch::Tensor incoming =
      make_dtensor(gradient, mesh_, param.layout.placements(mesh_), param.layout.sizes);
  for (const auto& hook : torch::autograd::impl::hooks(shard)) {
    torch::autograd::variable_list passed = (*hook)({incoming});
    if (passed[0].defined()) incoming = passed[0];
  }
  if (shard.grad().defined()) {
    shard.mutable_grad().add_(incoming);
  } else {
    shard.mutable_grad() = std::move(incoming);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(shard)) (*hook)(shard);
}

void ParamGroup::accumulate_gradients() {
  PlainOps plain;
  for (Param& param : params_) {
    const torch::Tensor member = param.lock_member();
    if (!member.defined() || param.reduce_dtype == param.layout.dtype) continue;
    torch::Tensor& gradient = member.mutable_grad();
    if (!gradient.defined() || is_stale(gradient)) continue;
    if (param.accumulated.defined()) {
      param.accumulated.add_(gradient);
    } else {
      param.accumulated = gradient.to(param.reduce_dtype);
    }
    gradient.reset();
  }
}

void ParamGroup::discard_gradients() {
  stage_.reset();
  reduces_.clear();
  for (Param& param : params_) {
    param.accumulated.reset();
    param.partial.reset();
    if (torch::Tensor member = param.lock_member(); member.defined()) member.mutable_grad().reset();
  }
}

void ParamGroup::poison_gradients() {
  for (Param& param : params_) {
    torch::Tensor member = param.lock_member();
    if (!member.defined() || !param.shard.requires_grad()) continue;
    if (!param.stale_gradient.defined()) {
      param.stale_gradient = stale_gradient(param.layout, mesh_.device());
    }
    member.mutable_grad() = param.stale_gradient;
  }
}

}  // namespace fsdp2::fsdp
