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
  std::optional<c10::ScalarType> param_dtype{};
  /// Of the reduction, and of gradients that add up while set_requires_gradient_sync(false). Not
  /// given: that of the gathered parameters. float16 is divided before the sum as well as after it,
  /// so that neither overflows.
  std::optional<c10::ScalarType> reduce_dtype{};
  /// Of what a module returns, at its boundary: floating tensors in its result are cast to it. Not
  /// given: the result stays as it is. It takes a call that passes a boundary: the one of the
  /// handle that fully_shard returns, or of a Hooked module (fsdp2/hooked.h).
  std::optional<c10::ScalarType> output_dtype{};
  /// Cast the floating tensors among a module's inputs to `param_dtype`, differentiably, at its
  /// boundary. A plain module that is called directly has none: a floating tensor of another dtype
  /// is then cast by the op in which it meets a parameter. False: inputs arrive untouched; without
  /// a boundary, such a meeting is an error.
  bool cast_forward_inputs = true;
};

}  // namespace fsdp2
