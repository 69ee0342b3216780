#include "dtensor/tensor_impl.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp2 {
namespace {

dtensor::SpecPtr spec_for(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements, const char* what) {
  TORCH_CHECK_TYPE(tensor.defined(), what, ": the tensor is undefined");
  TORCH_CHECK_TYPE(!is_dtensor(tensor), what,
                   ": the tensor is a DTensor already, use redistribute()");
  placements = dtensor::normalized(std::move(placements), tensor.dim(), what);
  for (const Placement& placement : placements) {
    TORCH_CHECK_VALUE(!placement.is_partial(), what, ": a whole tensor cannot be laid out as ",
                      placement.to_string());
  }
  register_dtensor();
  return dtensor::make_spec(mesh, placements);
}

DTensor leaf_of(const torch::Tensor& whole, const dtensor::SpecPtr& spec, bool requires_grad) {
  torch::NoGradGuard no_grad;
  const torch::Tensor part =
      dtensor::part_of(whole.detach(), *spec).clone(at::MemoryFormat::Contiguous);
  torch::Tensor leaf = dtensor::wrap(part, spec, whole.sizes());
  return DTensor(leaf.set_requires_grad(requires_grad));
}

}  // namespace

DTensor distribute_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements) {
  const auto spec = spec_for(tensor, mesh, std::move(placements), "distribute_tensor");
  torch::NoGradGuard no_grad;
  if (tensor.is_meta()) return leaf_of(tensor, spec, tensor.requires_grad());
  torch::Tensor whole = tensor.detach().to(mesh.device()).contiguous();
  if (whole.is_alias_of(tensor)) whole = whole.clone();
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (mesh.size(dim) == 1 || whole.numel() == 0) continue;
    wait(broadcast(whole.view(-1).view(at::kByte), 0, mesh.get_group(dim)),
         "broadcast in distribute_tensor");
  }
  return leaf_of(whole, spec, tensor.requires_grad());
}

DTensor chunk_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  const auto spec = spec_for(tensor, mesh, std::move(placements), "chunk_tensor");
  return leaf_of(tensor, spec, tensor.requires_grad());
}

}  // namespace fsdp2
