// Ops that make a new tensor after the size, dtype and device of a DTensor: zeros_like, new_zeros,
// ...

#include "dtensor/rules.h"

namespace fsdp2::dtensor {
namespace {

/// The new tensor lies as the old one does; what was Partial is whole.
void like(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  call.arg(0) = local_of(self);
  call.run();
  call.stack.back() =
      wrap(call.stack.back().toTensor(), without_partial(spec_of(self)), self.sizes());
}

/// Of the same size: laid out alike. Of another: replicated.
void with_size(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const std::vector<int64_t> sizes = call.arg(1).toIntVector();
  const bool alike = self.sizes() == c10::IntArrayRef(sizes);
  const SpecPtr spec = alike ? without_partial(spec_of(self)) : all_replicate(*spec_of(self));
  const Sizes local = local_sizes(*spec, sizes);
  if (const auto index = call.find("stride")) {
    const at::Tensor like =
        at::empty(sizes, at::device(at::kMeta)).as_strided(sizes, call.arg(*index).toIntVector());
    call.arg(*index) = c10::IntArrayRef(strides_like(local, like)).vec();
  }
  call.arg(0) = local_of(self);
  call.arg(1) = c10::IntArrayRef(local).vec();
  call.run();
  call.stack.back() = wrap(call.stack.back().toTensor(), spec, sizes);
}

}  // namespace

RuleTable factory_rules() {
  return {{"zeros_like", like},    {"ones_like", like},      {"full_like", like},
          {"empty_like", like},    {"new_zeros", with_size}, {"new_ones", with_size},
          {"new_full", with_size}, {"new_empty", with_size}, {"new_empty_strided", with_size}};
}

}  // namespace fsdp2::dtensor
