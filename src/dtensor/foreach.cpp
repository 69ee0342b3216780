// Ops over lists of tensors: _foreach_*, and the fused optimizers. The n-th tensors of all lists
// belong together.

#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace fsdp2::dtensor {
namespace {

using Lists = std::vector<std::pair<size_t, std::vector<at::Tensor>>>;

Lists lists_of(Call& call) {
  Lists lists;
  for (size_t i = 0; i < call.info.arguments; ++i) {
    if (!call.info.tensors[i]) continue;
    const c10::IValue& value = call.arg(i);
    if (value.isTensorList()) lists.emplace_back(i, value.toTensorVector());
  }
  return lists;
}

/// The layout of the n-th tensors: of the written one, else of the first DTensor. Nothing if all
/// are plain.
std::optional<Target> target_of(Call& call, const Lists& lists, size_t n) {
  const at::Tensor* leader = nullptr;
  for (const auto& [index, list] : lists) {
    if (n >= list.size() || !list[n].defined() || !is_dtensor(list[n])) continue;
    const bool better = !leader || (list[n].dim() > leader->dim());
    if (better) leader = &list[n];
    if (call.info.written[index]) break;
  }
  if (!leader) return std::nullopt;
  return Target{without_partial(spec_of(*leader)),
                Sizes(leader->sizes().begin(), leader->sizes().end())};
}

void foreach (Call& call) {
  const Lists lists = lists_of(call);
  size_t count = 0;
  for (const auto& [index, list] : lists) count = std::max(count, list.size());
  std::vector<std::optional<Target>> targets;
  for (size_t n = 0; n < count; ++n) targets.push_back(target_of(call, lists, n));
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> locals;
  for (const auto& [index, list] : lists) {
    std::vector<at::Tensor> parts;
    for (size_t n = 0; n < list.size(); ++n) {
      const at::Tensor& tensor = list[n];
      if (!targets[n] || !tensor.defined()) {
        parts.push_back(tensor);
        continue;
      }
      if (call.info.written[index] && tensor.dim() > 0) {
        if (!is_dtensor(tensor)) {
          call.refuse(tensor, "it would write a shard into the plain tensor at position " +
                                  std::to_string(n) + " of argument " + std::to_string(index));
        }
        if (spec_of(tensor)->partial) {
          call.refuse(tensor, "it would write to a tensor that is not reduced yet");
        }
      }
      parts.push_back(conform(call, tensor, *targets[n]));
    }
    locals.emplace_back(index, std::move(parts));
  }
  for (const auto& [index, list] : lists) {
    if (!call.info.written[index]) continue;
    for (const at::Tensor& tensor : list) {
      if (tensor.defined() && is_dtensor(tensor)) announce_write(tensor);
    }
  }
  for (auto& [index, parts] : locals) call.arg(index) = std::move(parts);
  for (size_t i = 0; i < call.info.arguments; ++i) {  // a single 0-dim tensor for all
    const c10::IValue& value = call.arg(i);
    if (!value.isTensor() || !value.toTensor().defined() || !is_dtensor(value.toTensor())) continue;
    if (value.toTensor().dim() > 0) call.refuse(value.toTensor(), "it must be 0-dim");
    call.arg(i) = local_of(finished(value.toTensor()));
  }
  call.run();
  if (call.info.returns == 0) return;
  for (size_t i = call.stack.size() - call.info.returns; i < call.stack.size(); ++i) {
    if (!call.stack[i].isTensorList()) continue;
    std::vector<at::Tensor> results = call.stack[i].toTensorVector();
    for (size_t n = 0; n < results.size(); ++n) {
      if (targets[n]) results[n] = wrap(results[n], targets[n]->spec, targets[n]->sizes);
    }
    call.stack[i] = std::move(results);
  }
}

/// One reduction a tensor, so that each leaves what spans ranks as a Partial.
void foreach_norm(Call& call) {
  const std::vector<at::Tensor> tensors = call.arg(0).toTensorVector();
  const at::Scalar order = call.arg(1).toScalar();
  std::optional<at::ScalarType> dtype;
  if (call.info.arguments > 2 && !call.arg(2).isNone()) dtype = call.arg(2).toScalarType();
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    norms.push_back(at::linalg_vector_norm(tensor, order, {}, false, dtype));
  }
  torch::jit::drop(call.stack, call.info.arguments);
  call.stack.emplace_back(std::move(norms));
}

void foreach_max(Call& call) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : call.arg(0).toTensorVector()) values.push_back(at::max(tensor));
  call.finish(std::move(values));
}

constexpr std::string_view kForeach =
    "_foreach_abs _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_ceil _foreach_clamp_max "
    "_foreach_clamp_min _foreach_copy _foreach_cos _foreach_div _foreach_exp _foreach_floor "
    "_foreach_lerp _foreach_log _foreach_maximum _foreach_minimum _foreach_mul _foreach_neg "
    "_foreach_pow _foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid "
    "_foreach_sign _foreach_sin _foreach_sqrt _foreach_sub _foreach_tanh _foreach_trunc "
    "_foreach_zero";

}  // namespace

RuleTable foreach_rules() {
  RuleTable table = {{"_foreach_norm.Scalar", foreach_norm}, {"_foreach_max", foreach_max}};
  add_rules(table, foreach, kForeach, /*in_place_too=*/true);
  add_rules(table, foreach, "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_");
  return table;
}

}  // namespace fsdp2::dtensor
