// Ops whose result steers the program: every rank gets the same answer.

#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <fsdp2/collectives.h>

namespace fsdp2::dtensor {
namespace {

/// True on all ranks of the mesh if true on all.
bool agreed(bool mine, const at::Tensor& dtensor) {
  const Spec& spec = *spec_of(dtensor);
  at::Tensor answer = at::scalar_tensor(mine ? 1 : 0, local_of(dtensor).options().dtype(at::kInt));
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (spec.mesh.size(dim) == 1) continue;
    wait(all_reduce(answer, ReduceOp::kMin, spec.mesh.get_group(dim)), "agreement on a DTensor");
  }
  return answer.item<int>() != 0;
}

void item(Call& call) {
  at::Tensor self = finished(call.arg(0).toTensor());
  if (self.numel() == 1 && !spec_of(self)->replicated) {
    self = redistributed(self, all_replicate(*spec_of(self)));
  } else if (self.numel() != 1) {
    call.refuse(self, "only a tensor of one element is a number");
  }
  call.arg(0) = local_of(self);
  call.run();
}

void equal(Call& call) {
  const at::Tensor self = call.arg(0).toTensor(), other = call.arg(1).toTensor();
  if (self.sizes() != other.sizes()) return call.finish(false);
  const at::Tensor& leader = is_dtensor(self) ? self : other;
  const Target target{without_partial(spec_of(leader)),
                      Sizes(leader.sizes().begin(), leader.sizes().end())};
  const at::Tensor a = conform(call, self, target), b = conform(call, other, target);
  call.finish(agreed(at::equal(a, b), leader));
}

void allclose(Call& call) {
  const at::Tensor close =
      at::isclose(call.arg(0).toTensor(), call.arg(1).toTensor(), call.arg(2).toDouble(),
                  call.arg(3).toDouble(), call.arg(4).toBool());
  call.finish(close.all().item<bool>());
}

/// Gradients are unscaled on shards; found_inf is the maximum over the ranks.
void unscale(Call& call) {
  const std::vector<at::Tensor> grads = call.arg(0).toTensorVector();
  const at::Tensor found = call.arg(1).toTensor();
  std::vector<at::Tensor> locals;
  at::Tensor leader;
  for (const at::Tensor& grad : grads) {
    if (!is_dtensor(grad)) {
      locals.push_back(grad);
      continue;
    }
    if (spec_of(grad)->partial) call.refuse(grad, "gradients must be reduced first");
    leader = grad;
    announce_write(grad);
    locals.push_back(local_of(grad));
  }
  TORCH_INTERNAL_ASSERT(leader.defined());
  call.arg(0) = locals;
  call.run();
  const Spec& spec = *spec_of(leader);
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (spec.mesh.size(dim) == 1) continue;
    wait(all_reduce(found, ReduceOp::kMax, spec.mesh.get_group(dim)),
         "agreement on non-finite gradients");
  }
}

}  // namespace

RuleTable agreement_rules() {
  return {{"_local_scalar_dense", item},
          {"equal", equal},
          {"allclose", allclose},
          {"_amp_foreach_non_finite_check_and_unscale_", unscale}};
}

}  // namespace fsdp2::dtensor
