#pragma once

// What every rule needs to make its operands agree on a layout.

#include "dtensor/call.h"

#include <c10/util/SmallVector.h>

namespace fsdp2::dtensor {

/// The layout and global size that the operands of an op are brought to.
struct Target {
  SpecPtr spec;
  Sizes sizes;
};

/// The local part of `operand` under `target`: of a DTensor redistributed if need be, of a plain
/// tensor of the same global size its own chunk, of a 0-dim tensor itself. An error, naming op,
/// sizes and remedy, for any other.
at::Tensor conform(const Call& call, const at::Tensor& operand, const Target& target);

/// A plain tensor may hold another value on each rank, as a batch does. Where that would become a
/// wrong number without notice, in autograd or read next to a parameter, only what is told to be
/// the same everywhere may meet this DTensor. (A gradient that backward hands on is.)
bool refuses_plain(const at::Tensor& dtensor, bool written);
/// The error that says so.
[[noreturn]] void refuse_plain(const Call& call, const at::Tensor& dtensor,
                               const at::Tensor& plain);

/// The op on the whole values of its DTensors, which every rank gathers. What it gives is
/// Replicate; what it writes stays in its layout. Plain operands must be 0-dim or of the first
/// DTensor's size, but for those that backward hands on.
void run_on_whole(Call& call);

/// True for a plain tensor that is not a C++ number in disguise.
inline bool is_plain_operand(const at::Tensor& tensor) {
  return !is_dtensor(tensor) && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

/// Pointwise ops over their tensor arguments (not lists). What a Partial operand does to them:
enum class Linearity {
  kNone,      // it is reduced first
  kKeeps,     // f(x) of any Partial is that Partial (copies)
  kUnary,     // linear in the one tensor argument: sum and avg stay
  kAdditive,  // linear if all tensor arguments are Partial alike
  kScaling,   // linear in the first if the rest are numbers
};
void run_pointwise(Call& call, Linearity linearity);

}  // namespace fsdp2::dtensor
