#include "dtensor/call.h"

#include <c10/core/GradMode.h>

namespace fsdp2::dtensor {

bool run_replicated(Call& call) {
  if (call.op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  at::Tensor first;
  bool fits = true;
  const auto check = [&](auto&& accept) {
    dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
      fits = fits && accept(tensor, index);
      return std::optional<at::Tensor>();
    });
  };
  check([&](const at::Tensor& tensor, size_t) {
    if (!is_dtensor(tensor)) return true;
    if (!first.defined()) first = tensor;
    return spec_of(tensor)->replicated && spec_of(tensor)->mesh == spec_of(first)->mesh;
  });
  check([&](const at::Tensor& tensor, size_t index) {
    if (is_dtensor(tensor)) return true;
    const bool differentiated = tensor.requires_grad() && c10::GradMode::is_enabled();
    return !call.info.written[index] && !differentiated &&
           (tensor.dim() == 0 || tensor.sizes() == first.sizes());
  });
  if (!fits) return false;
  std::vector<at::Tensor> dtensors;
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
    if (!is_dtensor(tensor)) return std::optional<at::Tensor>();
    if (call.info.written[index]) announce_write(tensor);
    dtensors.push_back(tensor);
    return std::optional<at::Tensor>(local_of(tensor));
  });
  call.run();
  for (const at::Tensor& dtensor : dtensors) {
    if (local_of(dtensor).sizes() != dtensor.sizes()) {
      call.refuse(dtensor, "it changed the size of what it writes");
    }
  }
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& result) {
    for (const at::Tensor& dtensor : dtensors) {
      if (result.is_same(local_of(dtensor))) return std::optional<at::Tensor>(dtensor);
    }
    return std::optional<at::Tensor>(call.info.view
                                         ? wrap_alias(result, spec_of(first), result.sizes(), first)
                                         : wrap(result, spec_of(first), result.sizes()));
  });
  return true;
}

}  // namespace fsdp2::dtensor
