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

/// What rank 0 of this mesh dimension has, on all of them.
torch::Tensor from_first(const torch::Tensor& tensor, const DeviceMesh& mesh, int64_t mesh_dim) {
  if (mesh.size(mesh_dim) == 1 || tensor.numel() == 0) return tensor;
  const torch::Tensor whole =
      mesh.get_local_rank(mesh_dim) == 0
          ? tensor.to(mesh.device()).contiguous()
          : torch::empty(tensor.sizes(), tensor.options().device(mesh.device()));
  wait(broadcast(whole, 0, mesh.get_group(mesh_dim)), "broadcast in distribute_tensor");
  return whole;
}

/// This rank's part along `dim` of what rank 0 of this mesh dimension has; the others hold no more
/// than that of it.
torch::Tensor scattered(const torch::Tensor& tensor, const DeviceMesh& mesh, int64_t mesh_dim,
                        int64_t dim, int64_t own_rank) {
  const int64_t ranks = mesh.size(mesh_dim), extent = tensor.size(dim);
  if (ranks == 1 || tensor.numel() == 0) {
    const Chunk own = chunk_of(extent, ranks, own_rank);
    return tensor.narrow(dim, own.offset, own.length);
  }
  // All send the first chunk's size, which trailing ones do not fill.
  const int64_t length = chunk_of(extent, ranks, 0).length;
  std::vector<int64_t> size = tensor.sizes().vec();
  size[dim] = length;
  const auto options = tensor.options().device(mesh.device());
  torch::Tensor chunks;
  if (own_rank == 0) {
    size.insert(size.begin(), ranks);
    chunks = torch::zeros(size, options);
    size.erase(size.begin());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Chunk chunk = chunk_of(extent, ranks, rank);
      chunks[rank]
          .narrow(dim, 0, chunk.length)
          .copy_(tensor.narrow(dim, chunk.offset, chunk.length));
    }
  }
  const torch::Tensor own = torch::empty(size, options);
  wait(scatter(own, chunks, 0, mesh.get_group(mesh_dim)), "scatter in distribute_tensor");
  return own.narrow(dim, 0, chunk_of(extent, ranks, own_rank).length);
}

}  // namespace

DTensor distribute_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements) {
  const auto spec = spec_for(tensor, mesh, std::move(placements), "distribute_tensor");
  torch::NoGradGuard no_grad;
  if (tensor.is_meta()) return leaf_of(tensor, spec, tensor.requires_grad());
  torch::Tensor part = tensor.detach();
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const Placement& placement = spec->placements[dim];
    part = placement.is_shard() ? scattered(part, mesh, dim, placement.dim(), spec->coordinate[dim])
                                : from_first(part, mesh, dim);
  }
  part = part.to(mesh.device()).contiguous();
  if (part.is_alias_of(tensor)) part = part.clone();
  const torch::Tensor leaf = dtensor::wrap(part, spec, tensor.sizes());
  return DTensor(leaf.set_requires_grad(tensor.requires_grad()));
}

DTensor chunk_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
  const auto spec = spec_for(tensor, mesh, std::move(placements), "chunk_tensor");
  return leaf_of(tensor, spec, tensor.requires_grad());
}

}  // namespace fsdp2
