#pragma once

// Moving local parts from one layout to another, below autograd.

#include "dtensor/spec.h"

namespace fsdp2::dtensor {

/// The local part, under `to`, of the tensor of size `sizes` whose local part under `from` is
/// `local`. Same mesh. Collective unless nothing has to move; may alias `local`. A change to
/// Partial is an error.
at::Tensor redistribute_local(const at::Tensor& local, c10::IntArrayRef sizes, const Spec& from,
                              const Spec& to);

/// The DTensor in another layout; itself if it has that already. Not differentiable.
at::Tensor redistributed(const at::Tensor& tensor, const SpecPtr& to);

/// Partial dimensions reduced, once for a tensor and its aliases. Itself if there are none.
at::Tensor finished(const at::Tensor& tensor);
/// The same for several 0-dim tensors: one collective for all that share a layout and dtype.
std::vector<at::Tensor> finished(std::vector<at::Tensor> tensors);

}  // namespace fsdp2::dtensor
