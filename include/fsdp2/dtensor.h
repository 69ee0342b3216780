#pragma once

// DTensor: a torch::Tensor with a global size whose data lies over a DeviceMesh.
// Follows torch.distributed.tensor (pytorch.org/docs/stable/distributed.tensor.html).
//
// A DTensor *is* a torch::Tensor: it can be stored, passed and stepped by torch::optim as one.
// sizes() is the global size; data_ptr(), storage() and accessors are errors. An op gives what it
// would give on the whole tensor, or is an error that names the op and the remedy (full_tensor(),
// to_local(), redistribute()); it never computes on local parts silently.
//
// What ops cost. Pointwise ops, and what runs along dimensions that are not sharded, move nothing.
// Reductions (sum, norm, max, ...) leave what spans ranks as a Partial; the first op that needs the
// value reduces it, in one collective, and once. Ops that mix elements of different ranks (mm and
// the rest of linear algebra, sort, cumsum, var, index_select, cat of different layouts, ...)
// gather their operands, and their results are Replicate. Such ops are collective: every rank must
// call them.
//
// Views. Where elements stay on their ranks (t(), view({7, 3, 1}), select along another dimension)
// a view aliases the local part. Others (view(-1), p[0], slice along the sharded dimension) are
// Replicate and show a gathered copy, which is coherent all the same: writing the view writes the
// tensor, and after ops have written the tensor the next op on the view gathers again. to_local()
// of one is an error. Backward through an in-place op on a view is an error.
//
// Plain tensors. One of the same global size that meets a DTensor counts as replicated, a 0-dim one
// as a number; other sizes, and next to a parameter that requires grad any, are errors: say that it
// is the same everywhere with distribute_tensor(tensor, mesh, {Replicate()}). A 0-dim DTensor that
// meets plain tensors only gives a plain tensor, so a loss may add plain and sharded terms.
// copy_, set_ (torch::load) and set_data take whole values; a DTensor keeps its size and layout.
//
// Gradients arrive in the layout of their leaf. Random ops and torch::nn::init (but sparse_) draw
// what one process with this seed would, at any number of ranks. item(), equal, allclose and
// found_inf of a gradient scaler agree on all ranks. torch::save, clone() of a module and printing
// as a torch::Tensor are errors: save full_tensor(), print to_string(). torch::optim::LBFGS and
// torch::nn::utils work on whole vectors on every rank.

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
  /// This rank's part, differentiable; shares memory with the DTensor. May be empty. Error for a
  /// view of elements of several ranks.
  torch::Tensor to_local() const;
  /// The whole tensor on every rank, differentiable. Collective.
  torch::Tensor full_tensor() const;
  /// The same values laid out anew, differentiable. Collective. From one Shard to another parts
  /// alone are sent. To Partial is an error, as in PyTorch.
  DTensor redistribute(Placements placements) const;

  /// "DTensor(local_tensor=..., device_mesh=..., placements=...)"
  std::string to_string() const;
};

std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

/// Splits a tensor that every rank passes with equal size: data of the mesh's rank 0 (of each dim)
/// is what counts, as in PyTorch. Collective; ranks receive no more than their part. The result is
/// a leaf that keeps requires_grad of `tensor`.
DTensor distribute_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          Placements placements);

/// distribute-by-chunking without communication: every rank must hold the same `tensor`.
DTensor chunk_tensor(const torch::Tensor& tensor, const DeviceMesh& mesh, Placements placements);

}  // namespace fsdp2
