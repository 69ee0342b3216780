#pragma once

// One op call that touches a DTensor, as a rule sees it.

#include "dispatch/intercept.h"
#include "dtensor/tensor_impl.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>

namespace fsdp2::dtensor {

struct Call {
  const c10::OperatorHandle& op;
  const dispatch::OpInfo& info;
  torch::jit::Stack& stack;

  c10::IValue& arg(size_t index) { return stack[stack.size() - info.arguments + index]; }
  /// The position of an argument by its name in the schema.
  std::optional<size_t> find(const char* name) const;
  /// Replaces the arguments by the op's results on them.
  void run() { op.callBoxed(stack); }
  /// Replaces the arguments by one result.
  void finish(c10::IValue result);
  void finish_nothing();

  std::string name() const;  // aten::add_.Tensor
  /// What op, on what tensor, and the remedy. `why` starts in lower case and has no full stop.
  [[noreturn]] void refuse(const at::Tensor& dtensor, const std::string& why) const;
};

using Rule = void (*)(Call&);

/// The rule for an op by its full name; null if there is none.
Rule find_rule(const c10::OperatorName& name);

/// Every layout is Replicate: any deterministic op on the whole values gives whole values. Tried
/// when no rule is found; false if the call does not qualify (then nothing has changed).
bool run_replicated(Call& call);

/// A leaf that an op records for backward gets its gradients in its own layout, whatever layout, or
/// plain tensor of the whole size, they arrive in. Cheap when done already.
void convert_gradients_of(const at::Tensor& tensor);

}  // namespace fsdp2::dtensor
