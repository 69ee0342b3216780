// stack and cat.

#include "dispatch/backward.h"
#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/stack.h>

#include <algorithm>

namespace fsdp2::dtensor {
namespace {

bool alike(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return is_dtensor(tensor) && same(spec_of(tensor), spec_of(tensors[0]));
  });
}

std::vector<at::Tensor> locals_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> locals;
  for (const at::Tensor& tensor : tensors) locals.push_back(local_of(tensor));
  return locals;
}

const at::Tensor& first_dtensor(const std::vector<at::Tensor>& tensors) {
  return *std::find_if(tensors.begin(), tensors.end(), is_dtensor);
}

/// Scalars of several layouts, as norms of parameters on several meshes: their whole values. Plain
/// unless all are DTensors on one mesh.
void stack_scalars(Call& call, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> dtensors, values;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(dtensors), is_dtensor);
  dtensors = finished(std::move(dtensors));
  auto next = dtensors.begin();
  bool one_mesh = dtensors.size() == tensors.size();
  for (const at::Tensor& tensor : tensors) {
    if (!is_dtensor(tensor)) {
      values.push_back(tensor);
      continue;
    }
    one_mesh = one_mesh && spec_of(*next)->mesh == spec_of(dtensors[0])->mesh;
    values.push_back(local_of(*next++));
  }
  const at::Tensor stacked = at::stack(values, 0);
  call.finish(one_mesh ? wrap(stacked, spec_of(dtensors[0]), stacked.sizes()) : stacked);
}

/// Tensors that do not lie alike, or are joined along a sharded dimension: of whole values.
void join_whole(Call& call, const std::vector<at::Tensor>& tensors) {
  const bool plain = !std::all_of(tensors.begin(), tensors.end(), is_dtensor);
  if (plain && !dispatch::inside_backward()) {
    call.refuse(first_dtensor(tensors),
                "it joins DTensors and plain tensors, which are different layouts: make those "
                "DTensors with distribute_tensor");
  }
  run_on_whole(call);
}

void stack(Call& call) {
  const std::vector<at::Tensor> tensors = call.arg(0).toTensorVector();
  const bool same_layout = alike(tensors);
  if (!same_layout) {
    const bool scalars = std::all_of(tensors.begin(), tensors.end(),
                                     [](const at::Tensor& tensor) { return tensor.dim() == 0; });
    if (scalars) return stack_scalars(call, tensors);
    return join_whole(call, tensors);
  }
  const int64_t at = at::maybe_wrap_dim(call.arg(1).toInt(), tensors[0].dim() + 1);
  std::vector<int64_t> sizes = tensors[0].sizes().vec();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.sizes() == tensors[0].sizes(), "stack expects tensors of equal size, got ",
                tensors[0].sizes(), " and ", tensor.sizes());
  }
  sizes.insert(sizes.begin() + at, static_cast<int64_t>(tensors.size()));
  const SpecPtr spec =
      map_shards(spec_of(tensors[0]), [&](int64_t dim) { return dim + (dim >= at); });
  call.finish(wrap(at::stack(locals_of(tensors), at), spec, sizes));
}

void cat(Call& call) {
  const std::vector<at::Tensor> tensors = call.arg(0).toTensorVector();
  const at::Tensor first = first_dtensor(tensors);
  const int64_t dim = at::maybe_wrap_dim(call.arg(1).toInt(), first.dim());
  if (!alike(tensors) || shards(*spec_of(first), dim)) return join_whole(call, tensors);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[dim] = 0;
  for (const at::Tensor& tensor : tensors) sizes[dim] += tensor.size(dim);
  call.finish(wrap(at::cat(locals_of(tensors), dim), spec_of(first), sizes));
}

}  // namespace

RuleTable stacking_rules() { return {{"stack", stack}, {"cat", cat}}; }

}  // namespace fsdp2::dtensor
