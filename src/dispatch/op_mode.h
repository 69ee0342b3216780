#pragma once

// Seeing every op that a thread runs, below autograd and above all backends. The key for it is
// `Fake`, which libtorch leaves to others and which no tensor carries but gathered ones on the meta
// device, so both uses of it meet here.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace fsdp2::dispatch {

using Boxed = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);

/// The kernel of tensors that carry the key; called for any op on the meta device. Once.
void set_fake_tensor_kernel(Boxed kernel);

/// Sees ops while an OpModeScope has it. Ops that run inside of one that it sees, those of the
/// op's kernel and its own, are not seen by it.
class OpMode {
 public:
  virtual ~OpMode() = default;
  /// In place of the op: replaces arguments on the stack by results.
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) = 0;

 protected:
  /// Goes on to the mode outside of this one, at last to the op's own kernel.
  static void proceed(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);
};

/// While it lives, `mode` sees what this thread runs, before the modes of outer scopes do. Null:
/// nobody sees it.
class OpModeScope {
 public:
  explicit OpModeScope(OpMode* mode);
  OpModeScope(const OpModeScope&) = delete;
  OpModeScope& operator=(const OpModeScope&) = delete;
  ~OpModeScope();

  OpMode* mode() const { return mode_; }
  const OpModeScope* outer() const { return outer_; }

 private:
  OpMode* const mode_;
  const OpModeScope* const outer_;
};

}  // namespace fsdp2::dispatch
