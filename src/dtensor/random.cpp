// Random numbers: those that one process would draw. Every rank draws the whole tensor and keeps
// its part, so ranks with one seed get the parts of one tensor; replicas take the first one's,
// whatever their seeds.

#include "dtensor/rules.h"

#include <fsdp2/collectives.h>

namespace fsdp2::dtensor {
namespace {

void agree_replicas(const at::Tensor& local, const Spec& spec) {
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (!spec.placements[dim].is_replicate() || spec.mesh.size(dim) == 1 || local.numel() == 0)
      continue;
    wait(broadcast(local.is_complex() ? at::view_as_real(local) : local, 0,
                   spec.mesh.get_group(dim)),
         "broadcast of random numbers");
  }
}

at::Tensor whole_like(const at::Tensor& dtensor) {
  return at::empty(dtensor.sizes(), local_of(dtensor).options());
}

void in_place(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const SpecPtr& spec = spec_of(self);
  if (spec->partial) call.refuse(self, "it would write to a tensor that is not reduced yet");
  call.arg(0) = whole_like(self);
  call.run();
  const at::Tensor part = part_of(call.stack.back().toTensor(), *spec).contiguous();
  agree_replicas(part, *spec);
  announce_write(self);
  local_of(self).copy_(part);
  call.stack.back() = self;
}

void random_like(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const SpecPtr spec = without_partial(spec_of(self));
  call.arg(0) = whole_like(self);
  call.run();
  const at::Tensor part =
      part_of(call.stack.back().toTensor(), *spec).clone(at::MemoryFormat::Contiguous);
  agree_replicas(part, *spec);
  call.stack.back() = wrap(part, spec, self.sizes());
}

}  // namespace

RuleTable random_rules() {
  return {{"normal_", in_place},          {"uniform_", in_place},       {"random_", in_place},
          {"bernoulli_.float", in_place}, {"exponential_", in_place},   {"cauchy_", in_place},
          {"log_normal_", in_place},      {"geometric_", in_place},     {"rand_like", random_like},
          {"randn_like", random_like},    {"randint_like", random_like}};
}

}  // namespace fsdp2::dtensor
