#include "fsdp/boundary.h"

#include "fsdp/wrapped_modules.h"

#include <fsdp2/hooked.h>

#include <algorithm>

namespace fsdp2 {
namespace fsdp {

bool inside_boundary(const ParamGroup& group) {
  const auto& open = detail::open_boundaries();
  return std::any_of(open.begin(), open.end(), [&](const auto& one) {
    const auto groups = static_cast<const FSDPModule::Impl*>(one.get())->groups();
    return std::any_of(groups.begin(), groups.end(),
                       [&group](const auto& own) { return own.get() == &group; });
  });
}

}  // namespace fsdp

namespace detail {

OpenBoundaries& open_boundaries() {
  thread_local OpenBoundaries open;
  return open;
}

Boundary::Boundary(const torch::nn::Module& module) : module_(module) {
  const fsdp::State state = fsdp::wrapped_modules().find(module);
  if (!state) return;
  wrapped_ = true;
  if (state->mp_policy.cast_forward_inputs) input_dtype_ = state->mp_policy.param_dtype;
  output_dtype_ = state->mp_policy.output_dtype;
  open_boundaries().push_back(state);
}

Boundary::~Boundary() {
  if (wrapped_) open_boundaries().pop_back();
}

void Boundary::cast(at::Tensor& tensor, c10::ScalarType dtype) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == dtype) return;
  tensor = tensor.to(dtype);
}

void Boundary::refuse(const std::type_info& type, c10::ScalarType dtype) const {
  const std::string name = c10::demangle(type.name());
  TORCH_CHECK(false, "the boundary of this ", module_.name(), " is to cast floating tensors to ",
              dtype, ", but among its inputs or outputs is a value of type '", name,
              "', which cannot be searched for tensors. In the namespace of that type, define\n"
              "  template <class Visit> void fsdp2_for_each_tensor(",
              name,
              "& value, Visit&& visit) { visit(value.field, value.other_field); }\n"
              "naming the fields that may hold tensors, or specialise fsdp2::HoldsNoTensors if it "
              "holds none.");
}

}  // namespace detail

void* Values::at(size_t index, const std::type_info& type) const {
  TORCH_CHECK(index < values_.size(), "a hook asked for value ", index, " of a call that has ",
              values_.size());
  const Value& value = values_[index];
  TORCH_CHECK(*value.type == type, "a hook asked for value ", index, " as a ",
              c10::demangle(type.name()), ", but it is a ", c10::demangle(value.type->name()));
  return value.address;
}

void HookHandle::remove() {
  if (const auto once = std::exchange(remove_, nullptr)) once();
}

void ForwardHooks::run_before(torch::nn::Module& module, Values inputs) const {
  const auto hooks = *pre_hooks_;
  for (const auto& hook : hooks) (*hook)(module, inputs);
}

void ForwardHooks::run_after(torch::nn::Module& module, Values inputs, Values output) const {
  const auto hooks = *hooks_;
  for (const auto& hook : hooks) (*hook)(module, inputs, output);
}

}  // namespace fsdp2
