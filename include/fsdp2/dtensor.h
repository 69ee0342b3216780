#pragma once

// DTensor: a torch::Tensor with a global size whose data lies over a DeviceMesh.
// Follows torch.distributed.tensor (pytorch.org/docs/stable/distributed.tensor.html).
//
// A DTensor *is* a torch::Tensor: it can be stored, passed and stepped by torch::optim as one.
// sizes() is the global size; data_ptr(), storage() and accessors are errors. An op that cannot be
// done on shards is an error that names the op and the remedy (full_tensor(), to_local(),
// redistribute()); it never computes on local parts silently. A plain tensor of the same global
// size that meets a DTensor counts as replicated.
//
// Reductions (sum, norm, max, ...) leave what spans ranks as a Partial; the first op that needs the
// value reduces it, in one collective, and once. A 0-dim DTensor that meets plain tensors only
// gives a plain tensor, so a loss may add plain and sharded terms. Gradients arrive in the layout
// of their leaf. Random ops (normal_, ...) draw what one process would.

#include <fsdp2/device_mesh.h>
#include <fsdp2/placement.h>

#include <torch/types.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2 {

/// True for every tensor that this page describes; false for an undefined one.
bool is_dtensor(const torch::Tensor& tensor);

/// A typed handle; converts to torch::Tensor for free.
class DTensor : public torch::Tensor {
 public:
  DTensor() = default;
  /// Error if `tensor` is not a DTensor.
  explicit DTensor(const torch::Tensor& tensor);

  /// Wraps each rank's part, differentiably, without a copy. Without `size` the local sizes are
  /// gathered and added up (collective); with it they are checked against the chunk rule. Errors
  /// name rank, given and expected size.
  static DTensor from_local(const torch::Tensor& local, const DeviceMesh& mesh,
                            Placements placements,
                            std::optional<std::vector<int64_t>> size = std::nullopt);

  const DeviceMesh& device_mesh() const;
  const Placements& placements() const;
  /// This rank's part, differentiable; shares memory with the DTensor. May be empty.
  torch::Tensor to_local() const;
  /// The whole tensor on every rank, differentiable. Collective.
  torch::Tensor full_tensor() const;
  /// The same values laid out anew, differentiable. Collective. To Partial is an error, as in
  /// PyTorch.
  DTensor redistribute(Placements placements) const;

  /// "DTensor(local_tensor=..., device_mesh=..., placements=...)"
  std::string to_string() const;
};

std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

/// Splits a tensor that every rank passes with equal size: data of the mesh's rank 0 (of each dim)
/// is what counts, as in PyTorch. Collective. The result is a leaf that keeps requires_grad of
/// `tensor`.
DTensor distribute_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements);

/// distribute-by-chunking without communication: every rank must hold the same `tensor`.
DTensor chunk_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh, Placements placements);

}  // namespace fsdp2
