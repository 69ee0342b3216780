#pragma once

#include <torch/csrc/autograd/variable.h>

namespace fsdp2::dispatch {

/// What set_data does, but between the meta device and others too. The tensor must be in no graph.
inline void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace fsdp2::dispatch
