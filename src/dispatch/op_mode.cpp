#include "dispatch/op_mode.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>

namespace fsdp2::dispatch {
namespace {

constexpr c10::DispatchKey kSeesAll = c10::DispatchKey::Fake;

std::atomic<Boxed> fake_tensor_kernel{nullptr};
thread_local const OpModeScope* innermost_mode = nullptr;

void enter(const OpModeScope* scope) {
  innermost_mode = scope;
  c10::impl::tls_set_dispatch_key_included(kSeesAll, scope && scope->mode());
}

class Entered {
 public:
  explicit Entered(const OpModeScope* scope) { enter(scope); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() { enter(before_); }

 private:
  const OpModeScope* const before_ = innermost_mode;
};

void through_modes(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const OpModeScope* scope = innermost_mode;
  if (scope && scope->mode()) {
    const Entered outside(scope->outer());
    return scope->mode()->run(op, keys, stack);
  }
  const Boxed kernel = fake_tensor_kernel;
  if (kernel && keys.has_backend(c10::BackendComponent::MetaBit)) return kernel(op, keys, stack);
  op.redispatchBoxed(keys.remove(kSeesAll), stack);
}

void register_key() {
  static auto* library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kSeesAll, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&through_modes>());
    return made;
  }();  // for the life of the process
  static_cast<void>(library);
}

}  // namespace

void set_fake_tensor_kernel(Boxed kernel) {
  fake_tensor_kernel = kernel;
  register_key();
}

void OpMode::proceed(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  through_modes(op, keys, stack);
}

OpModeScope::OpModeScope(OpMode* mode) : mode_(mode), outer_(innermost_mode) {
  if (mode) register_key();
  enter(this);
}

OpModeScope::~OpModeScope() { enter(outer_); }

}  // namespace fsdp2::dispatch
