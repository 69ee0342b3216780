#pragma once

// Interception of ATen ops for tensors that carry an extra backend bit (PrivateUse2: DTensor,
// PrivateUse3: gathered parameters). Two boxed kernels are mirrored over every op:
//  - below autograd, at the bit's backend key, in place of the op's CPU or CUDA kernel;
//  - above autograd, at the bit's autograd key, before the op's own autograd kernel (optional).
// Mirrored op by op and not only as a fallback: composite kernels would win over a fallback,
// decompose differently and read data before they dispatch. Registration is for the life of the
// process; ops that touch no such tensor pay nothing.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>
#include <vector>

namespace fsdp2::dispatch {

/// What a kernel needs to know of an op's schema, worked out once an op.
struct OpInfo {
  explicit OpInfo(const c10::FunctionSchema& schema, uint32_t flags = 0);
  size_t arguments = 0;
  size_t returns = 0;
  /// Every return is an alias of an argument that is not written: sizes are needed, data is not.
  bool view = false;
  /// Some argument is written.
  bool mutates = false;
  /// Per argument: written; holds tensors (a tensor, a list, or a list of optionals).
  std::vector<bool> written;
  std::vector<bool> tensors;
  /// The intercepting layer's own: what its `classify` said.
  uint32_t flags = 0;
};

using Below = void (*)(const c10::OperatorHandle&, const OpInfo&, c10::DispatchKeySet,
                       torch::jit::Stack*);
/// `next` is the op's own autograd kernel: call next.callBoxed(op, keys, stack) to go on.
using Next = decltype(std::declval<const c10::OperatorHandle&>().getComputedKernelForDispatchKey(
    c10::DispatchKey::AutogradCPU));
using Above = void (*)(const c10::OperatorHandle&, const OpInfo&, c10::DispatchKeySet,
                       torch::jit::Stack*, const Next& next);

struct Interception {
  c10::BackendComponent bit;
  Below below = nullptr;
  Above above = nullptr;  // may stay null
  /// What the schema does not say of an op; kept in OpInfo::flags. May stay null.
  uint32_t (*classify)(const c10::FunctionSchema& schema) = nullptr;
  /// With one of these flags an op that is composite below autograd too (and so has no kernel to
  /// stand in for) is seen by `above`.
  uint32_t above_composites = 0;
  /// Also stand in for sparse, CSR, nested and quantized kernels, so that our tensors can meet such
  /// tensors.
  bool all_layouts = false;
};

/// Installs the kernels. A second call with the same bit covers ops that were registered since (a
/// few ms). Thread-safe.
void intercept(const Interception& interception);

/// Replaces tensors among the arguments on the stack. `map(tensor, argument index)` returns the
/// tensor to put in its place, or nothing to leave it. Lists are rebuilt only if something in them
/// changed; undefined tensors are skipped.
template <class Map>
void map_arguments(const OpInfo& info, torch::jit::Stack& stack, Map&& map);
/// The same over the results.
template <class Map>
void map_returns(const OpInfo& info, torch::jit::Stack& stack, Map&& map);

namespace detail {

template <class Map>
void map_value(c10::IValue& value, Map&& map) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    if (std::optional<at::Tensor> mapped = map(tensor)) value = std::move(*mapped);
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list = value.toTensorVector();
    bool changed = false;
    for (at::Tensor& tensor : list) {
      if (!tensor.defined()) continue;
      if (std::optional<at::Tensor> mapped = map(tensor)) {
        tensor = std::move(*mapped);
        changed = true;
      }
    }
    if (changed) value = std::move(list);
  } else if (value.isList()) {  // Tensor?[]
    c10::List<std::optional<at::Tensor>> list;
    bool changed = false;
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() || !element.toTensor().defined()) {
        list.push_back(std::nullopt);
        continue;
      }
      std::optional<at::Tensor> mapped = map(element.toTensor());
      changed = changed || mapped.has_value();
      list.push_back(mapped ? *mapped : element.toTensor());
    }
    if (changed) value = std::move(list);
  }
}

}  // namespace detail

template <class Map>
void map_arguments(const OpInfo& info, torch::jit::Stack& stack, Map&& map) {
  const size_t base = stack.size() - info.arguments;
  for (size_t i = 0; i < info.arguments; ++i) {
    if (info.tensors[i]) {
      detail::map_value(stack[base + i], [&](const at::Tensor& tensor) { return map(tensor, i); });
    }
  }
}

template <class Map>
void map_returns(const OpInfo& info, torch::jit::Stack& stack, Map&& map) {
  for (size_t i = stack.size() - info.returns; i < stack.size(); ++i) {
    c10::IValue& value = stack[i];
    if (value.isTensor() || value.isTensorList()) detail::map_value(value, map);
  }
}

}  // namespace fsdp2::dispatch
