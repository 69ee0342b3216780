// Ops that move values: copy_, set_, clone, dtype conversion.

#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace fsdp2::dtensor {
namespace {

void same_values(Call& call) { run_pointwise(call, Linearity::kKeeps); }

void copy_into(Call& call) {
  const at::Tensor self = call.arg(0).toTensor(), source = call.arg(1).toTensor();
  const bool alike = is_dtensor(self) && is_dtensor(source) && self.sizes() == source.sizes() &&
                     same(spec_of(self), spec_of(source));
  run_pointwise(call, alike ? Linearity::kKeeps : Linearity::kNone);
}

/// What torch::load does to a parameter: takes the values, since the local part may be managed by
/// others.
void set_source(Call& call) {
  const at::Tensor self = call.arg(0).toTensor(), source = call.arg(1).toTensor();
  if (!is_dtensor(self)) call.refuse(source, "it would make a plain tensor of shards");
  if (self.dtype() != source.dtype() || self.sizes() != source.sizes()) {
    std::ostringstream why;
    why << "the values of a " << source.dtype() << " tensor of size " << source.sizes()
        << " cannot be taken by a " << self.dtype() << " tensor of size " << self.sizes()
        << ": give the whole values, or wrap this rank's part with DTensor::from_local";
    call.refuse(self, why.str());
  }
  const Target target{spec_of(self), Sizes(self.sizes().begin(), self.sizes().end())};
  const at::Tensor part = conform(call, source, target);
  announce_write(self);
  local_of(self).copy_(part);
  call.finish(self);
}

void changes_size(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  call.refuse(self,
              "it would change size or memory in place; make a new tensor, or copy_() values");
}

void to_copy(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const auto device = call.find("device");
  if (device && call.arg(*device).isDevice() &&
      call.arg(*device).toDevice().type() != self.device().type()) {
    std::ostringstream why;
    why << "its mesh is on " << self.device().type() << ", it cannot move to "
        << call.arg(*device).toDevice();
    call.refuse(self, why.str());
  }
  run_pointwise(call, Linearity::kKeeps);
}

}  // namespace

RuleTable copy_rules() {
  RuleTable table = {{"copy_", copy_into},
                     {"copy", copy_into},
                     {"clone", same_values},
                     {"_to_copy", to_copy},
                     {"set_.source_Tensor", set_source}};
  add_rules(table, changes_size,
            "resize_ resize_as_ set_ squeeze_ unsqueeze_ t_ transpose_ as_strided_");
  return table;
}

}  // namespace fsdp2::dtensor
