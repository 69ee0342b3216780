#pragma once

// Crossing between DTensors and plain tensors, and between layouts, under autograd. A DTensor's
// gradient is that of its global value: a Partial's is Replicate.

#include "dtensor/tensor_impl.h"

namespace fsdp2::dtensor {

at::Tensor wrap_differentiably(const at::Tensor& local, const SpecPtr& spec,
                               c10::IntArrayRef sizes);
at::Tensor unwrap_differentiably(const at::Tensor& tensor);
/// Fresh memory, unless the layout is that already.
at::Tensor redistribute_differentiably(const at::Tensor& tensor, const SpecPtr& to);

}  // namespace fsdp2::dtensor
