#pragma once

// In which dtype wrapped modules compute and reduce. Follows
// torch.distributed.fsdp.MixedPrecisionPolicy.

#include <c10/core/ScalarType.h>

#include <optional>

namespace fsdp2 {

/// Shards, their gradients and the optimizer's state keep the parameters' own dtype; only floating
/// parameters are concerned.
struct MixedPrecisionPolicy {
  /// Of the gathered parameters, hence of compute and of the all-gather: the module's members have
  /// it from fully_shard on. Not given: the parameters' own.
  std::optional<c10::ScalarType> param_dtype;
  /// Of the reduction, and of gradients that add up while set_requires_gradient_sync(false). Not
  /// given: that of the gathered parameters. float16 is divided before the sum as well as after it,
  /// so that neither overflows.
  std::optional<c10::ScalarType> reduce_dtype;
  /// A plain module has no boundary at which its inputs could be cast: a floating tensor of another
  /// dtype is cast to `param_dtype`, differentiably, by the op in which it meets a parameter.
  /// False: such a meeting is an error.
  bool cast_forward_inputs = true;
};

}  // namespace fsdp2
