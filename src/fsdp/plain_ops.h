#pragma once

#include "dispatch/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace fsdp2::fsdp {

/// Scope for the library's own arithmetic, which may run in the middle of a user's op: whatever
/// modes the user is in (inference, autograd, autocast, those that see ops), tensors made here are
/// ordinary and nothing is recorded.
class PlainOps {
  dispatch::OpModeScope unseen_{nullptr};
  c10::InferenceMode inference_{false};
  at::NoGradGuard no_grad_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace fsdp2::fsdp
