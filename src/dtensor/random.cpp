// Random numbers: those that one process would draw. Every rank draws the whole tensor and keeps
// its part, so ranks with one seed get the parts of one tensor; replicas take the first one's,
// whatever their seeds.

#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"
#include "mesh/mesh_impl.h"

namespace fsdp2::dtensor {
namespace {

void agree_replicas(const at::Tensor& local, const Spec& spec) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (spec.placements[dim].is_replicate()) dims.push_back(dim);
  }
  broadcast_from_first(local, spec.mesh, dims, "broadcast of random numbers");
}

at::Tensor whole_like(const at::Tensor& dtensor) {
  const auto options = local_of(dtensor).options();
  return dtensor.is_non_overlapping_and_dense()  // some fills follow the order of memory
             ? at::empty_strided(dtensor.sizes(), dtensor.strides(), options)
             : at::empty(dtensor.sizes(), options);
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

/// Draws that depend on whole values.
void from_whole(Call& call) {
  run_on_whole(call);
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& result) {
    agree_replicas(local_of(result), *spec_of(result));
    return std::optional<at::Tensor>();
  });
}

/// bernoulli_(p), with a chance for each element.
void in_place_from(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  if (!is_dtensor(self)) call.refuse(call.arg(1).toTensor(), "it would write to a plain tensor");
  if (spec_of(self)->partial)
    call.refuse(self, "it would write to a tensor that is not reduced yet");
  const at::Tensor chances = call.arg(1).toTensor();
  const Target target{all_replicate(*spec_of(self)),
                      Sizes(self.sizes().begin(), self.sizes().end())};
  call.arg(1) = conform(call, chances, target);
  in_place(call);
}

}  // namespace

RuleTable random_rules() {
  return {{"bernoulli_.Tensor", in_place_from},
          {"bernoulli", from_whole},
          {"native_dropout", from_whole},
          {"multinomial", from_whole},
          {"poisson", from_whole},
          {"normal.Tensor_float", from_whole},
          {"normal.float_Tensor", from_whole},
          {"normal.Tensor_Tensor", from_whole},
          {"normal_", in_place},
          {"uniform_", in_place},
          {"random_", in_place},
          {"bernoulli_.float", in_place},
          {"exponential_", in_place},
          {"cauchy_", in_place},
          {"log_normal_", in_place},
          {"geometric_", in_place},
          {"rand_like", random_like},
          {"randn_like", random_like},
          {"randint_like", random_like}};
}

}  // namespace fsdp2::dtensor
