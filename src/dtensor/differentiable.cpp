#include "dtensor/differentiable.h"

#include "dtensor/call.h"
#include "dtensor/mirror.h"
#include "dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <functional>
#include <memory>
#include <utility>

namespace fsdp2::dtensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Backward = std::function<at::Tensor(const at::Tensor&)>;

struct Held : torch::CustomClassHolder {
  Held(at::Tensor result, Backward backward)
      : result(std::move(result)), backward(std::move(backward)) {}
  at::Tensor result;  // until forward returns it
  Backward backward;
};

/// Gives `result` the history "linear in `input`". Differentiable twice because `backward` is made
/// of the functions below.
struct Crossing : torch::autograd::Function<Crossing> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor&,
                            const c10::intrusive_ptr<Held>& held) {
    context->saved_data["backward"] = c10::IValue::make_capsule(held);
    return std::exchange(held->result, at::Tensor());
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto held =
        c10::static_intrusive_pointer_cast<Held>(context->saved_data["backward"].toCapsule());
    return {held->backward(grads[0]), at::Tensor()};
  }
};

at::Tensor recorded(at::Tensor result, const at::Tensor& input, Backward backward) {
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return result;
  if (is_dtensor(input)) convert_gradients_of(input);
  return Crossing::apply(input, c10::make_intrusive<Held>(std::move(result), std::move(backward)));
}

/// A gradient of a DTensor as a DTensor in its layout. Plain ones come from ops that only saw the
/// global size.
at::Tensor in_layout(const at::Tensor& grad, const SpecPtr& spec, c10::IntArrayRef sizes) {
  at::Tensor whole = grad;
  if (!is_dtensor(grad)) {
    TORCH_CHECK(grad.sizes() == sizes, "a plain gradient of size ", grad.sizes(),
                " reached a DTensor of size ", sizes);
    whole = wrap_differentiably(grad, all_replicate(*spec), sizes);
  }
  return redistribute_differentiably(whole, spec);
}

/// How much the global value changes with one rank's part of a Partial; parts of Shards and
/// Replicates are the value.
double share_of_part(const Spec& spec) {
  double share = 1;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& placement = spec.placements[i];
    if (!placement.is_partial() || placement.reduce_op() == "sum") continue;
    TORCH_CHECK_NOT_IMPLEMENTED(placement.reduce_op() == "avg", "the local part of a ",
                                placement.to_string(),
                                " DTensor has no gradient: redistribute first");
    share /= static_cast<double>(spec.mesh.size(static_cast<int64_t>(i)));
  }
  return share;
}

at::Tensor scaled(const at::Tensor& tensor, double factor) {
  return factor == 1 ? tensor : tensor * factor;
}

/// Without autograd. Writes to it are writes to the local part, and count as such.
at::Tensor alias_of(const at::Tensor& local) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor alias = local.alias();
  share_version(alias, local);
  return alias;
}

}  // namespace

at::Tensor wrap_differentiably(const at::Tensor& local, const SpecPtr& spec,
                               c10::IntArrayRef sizes) {
  at::Tensor result = wrap(alias_of(local), spec, sizes);
  const SpecPtr back = without_partial(spec);
  const std::vector<int64_t> size = sizes.vec();
  return recorded(std::move(result), local, [=](const at::Tensor& grad) {
    return scaled(unwrap_differentiably(in_layout(grad, back, size)), share_of_part(*spec));
  });
}

at::Tensor unwrap_differentiably(const at::Tensor& tensor) {
  update(tensor);
  at::Tensor result = alias_of(local_of(tensor));
  const SpecPtr spec = spec_of(tensor);
  const std::vector<int64_t> size = tensor.sizes().vec();
  return recorded(std::move(result), tensor, [=](const at::Tensor& grad) {
    return wrap_differentiably(scaled(grad, 1 / share_of_part(*spec)), without_partial(spec), size);
  });
}

at::Tensor redistribute_differentiably(const at::Tensor& tensor, const SpecPtr& to) {
  const SpecPtr from = spec_of(tensor);
  update(tensor);
  if (same(from, to)) return tensor;
  at::Tensor result = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor& local = local_of(tensor);
    const bool reduced = from->partial && same(to, without_partial(from));
    at::Tensor out = reduced ? finished(tensor) : redistributed(tensor, to);
    const bool shared = reduced || local_of(out).is_alias_of(local);
    return shared ? wrap(local_of(out).clone(), to, tensor.sizes()) : out;
  }();
  const SpecPtr back = without_partial(from);
  const std::vector<int64_t> size = tensor.sizes().vec();
  return recorded(std::move(result), tensor,
                  [=](const at::Tensor& grad) { return in_layout(grad, back, size); });
}

void convert_gradients_of(const at::Tensor& tensor) {
  DTensorImpl* impl = impl_of(tensor);
  if (!impl->autograd_meta() || impl->converts_grad.load(std::memory_order_relaxed)) return;
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  if (impl->converts_grad.exchange(true)) return;
  const SpecPtr spec = without_partial(impl->spec);
  const std::vector<int64_t> size = tensor.sizes().vec();
  tensor.register_hook([=](const at::Tensor& grad) { return in_layout(grad, spec, size); });
}

}  // namespace fsdp2::dtensor
