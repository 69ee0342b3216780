#pragma once

// The norm of all gradients together, and clipping by it. Follows torch.nn.utils.clip_grad_norm_
// (pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html).

#include <torch/types.h>

#include <vector>

namespace fsdp2 {

/// Scales gradients, in place, so that the norm of all of them as one vector is at most `max_norm`
/// (infinite: leaves them as they are); returns the norm before that, the same number on all ranks.
/// Parameters may be plain ones, whose gradients count as replicated, and DTensors of several
/// meshes; undefined gradients are skipped, and no gradient at all is a norm of 0. `norm_type` is
/// positive or infinite. Norms of 16-bit gradients are computed in float32, and what is added over
/// tensors and ranks in float64. Gradients that need no scaling keep their bits.
///
/// Collective over the meshes: one all-reduce a mesh dimension along which something is sharded,
/// whatever the number of parameters. Errors before anything changes: norm_type or max_norm out of
/// range; a sparse gradient, or a Partial one (redistribute() it); with `error_if_nonfinite`, on
/// all ranks, a norm that is infinite or not a number.
double clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                       double norm_type = 2, bool error_if_nonfinite = false);

}  // namespace fsdp2
