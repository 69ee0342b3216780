#include "dispatch/intercept.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

namespace fsdp2::dispatch {
namespace {

using c10::DispatchKey;
using c10::KernelFunction;

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  if (type.kind() != c10::TypeKind::OptionalType && type.kind() != c10::TypeKind::ListType) {
    return false;
  }
  for (const c10::TypePtr& inner : type.containedTypes()) {
    if (holds_tensors(*inner)) return true;
  }
  return false;
}

OpInfo info_of(const c10::FunctionSchema& schema, const Interception& interception) {
  return OpInfo(schema, interception.classify ? interception.classify(schema) : 0);
}

struct BelowKernel : c10::OperatorKernel {
  BelowKernel(Below below, OpInfo info) : below(below), info(std::move(info)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    below(op, info, keys, stack);
  }
  Below below;
  OpInfo info;
};

/// For ops that come with no kernel of their own for a dense tensor.
struct BelowFallback : c10::OperatorKernel {
  explicit BelowFallback(const Interception& interception) : interception(interception) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    interception.below(op, info_of(op.schema(), interception), keys, stack);
  }
  Interception interception;
};

struct AboveKernel : c10::OperatorKernel {
  AboveKernel(Above above, Next next, OpInfo info)
      : above(above), next(std::move(next)), info(std::move(info)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    above(op, info, keys, stack, next);
  }
  Above above;
  Next next;
  OpInfo info;
};

/// The keys of one kind of tensor: ours, and those whose kernels say that an op can take it.
struct Layout {
  DispatchKey ours, cpu, cuda;
};

std::vector<Layout> layouts_of(const Interception& interception) {
  using K = DispatchKey;
  auto ours = [&](DispatchKey functionality) {
    return c10::toRuntimePerBackendFunctionalityKey(functionality, interception.bit);
  };
  std::vector<Layout> layouts = {{ours(K::Dense), K::CPU, K::CUDA}};
  if (interception.all_layouts) {
    layouts.push_back({ours(K::Sparse), K::SparseCPU, K::SparseCUDA});
    layouts.push_back({ours(K::SparseCsr), K::SparseCsrCPU, K::SparseCsrCUDA});
    layouts.push_back({ours(K::NestedTensor), K::NestedTensorCPU, K::NestedTensorCUDA});
    layouts.push_back({ours(K::Quantized), K::QuantizedCPU, K::QuantizedCUDA});
  }
  return layouts;
}

std::mutex mutex;
std::vector<c10::RegistrationHandleRAII>& handles() {
  // Never destroyed: kernels must outlive every tensor, also those in static storage.
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;
  return *kept;
}

constexpr const char* kDebug = "fsdp2";

void register_fallbacks(const Interception& interception, DispatchKey autograd) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const Layout& layout : layouts_of(interception)) {
    handles().push_back(dispatcher.registerFallback(
        layout.ours,
        KernelFunction::makeFromBoxedFunctor(std::make_unique<BelowFallback>(interception)),
        kDebug));
  }
  // Custom ops without an autograd kernel find libtorch's fallback at the known backends only.
  auto* library = new torch::Library(torch::Library::IMPL, "_", autograd, __FILE__, __LINE__);
  library->fallback(torch::autograd::basicAutogradNotImplementedFallback());
}

}  // namespace

OpInfo::OpInfo(const c10::FunctionSchema& schema, uint32_t flags)
    : arguments(schema.arguments().size()),
      returns(schema.returns().size()),
      view(returns > 0),
      flags(flags) {
  for (const c10::Argument& argument : schema.arguments()) {
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    written.push_back(writes);
    tensors.push_back(holds_tensors(*argument.type()));
    mutates = mutates || writes;
  }
  for (const c10::Argument& result : schema.returns()) {
    view = view && result.alias_info() && !result.alias_info()->isWrite();
  }
}

void intercept(const Interception& interception) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& dispatcher = c10::Dispatcher::singleton();
  const DispatchKey autograd = c10::toRuntimePerBackendFunctionalityKey(
      DispatchKey::AutogradFunctionality, interception.bit);
  const std::vector<Layout> layouts = layouts_of(interception);
  static std::vector<c10::BackendComponent> known;
  if (std::find(known.begin(), known.end(), interception.bit) == known.end()) {
    register_fallbacks(interception, autograd);
    known.push_back(interception.bit);
  }
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    std::optional<c10::OperatorHandle> op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const auto& entry = *op;
    const bool composite =
        entry.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        entry.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    for (const Layout& layout : layouts) {
      const bool taken = entry.hasKernelForDispatchKey(layout.ours);
      const bool wanted = composite || entry.hasKernelForDispatchKey(layout.cpu) ||
                          entry.hasKernelForDispatchKey(layout.cuda);
      if (taken || !wanted) continue;
      handles().push_back(dispatcher.registerImpl(
          name, layout.ours,
          KernelFunction::makeFromBoxedFunctor(std::make_unique<BelowKernel>(
              interception.below, info_of(op->schema(), interception))),
          std::nullopt, nullptr, kDebug));
    }
    const bool dense = composite || entry.hasKernelForDispatchKey(DispatchKey::CPU) ||
                       entry.hasKernelForDispatchKey(DispatchKey::CUDA) ||
                       entry.hasKernelForDispatchKey(DispatchKey::AutogradCPU) ||
                       entry.hasKernelForDispatchKey(DispatchKey::AutogradCUDA);
    const bool seen =
        dense || (info_of(op->schema(), interception).flags & interception.above_composites);
    if (!interception.above || !seen || entry.hasKernelForDispatchKey(autograd)) continue;
    handles().push_back(dispatcher.registerImpl(
        name, autograd,
        KernelFunction::makeFromBoxedFunctor(std::make_unique<AboveKernel>(
            interception.above, op->getComputedKernelForDispatchKey(DispatchKey::AutogradCPU),
            info_of(op->schema(), interception))),
        std::nullopt, nullptr, kDebug));
  }
}

}  // namespace fsdp2::dispatch
