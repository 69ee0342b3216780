#pragma once

// Activation checkpointing: what backward needs of a function is not kept but computed again.
// Follows the non-reentrant torch.utils.checkpoint (pytorch.org/docs/stable/checkpoint.html).
//
//   torch::Tensor y = fsdp2::checkpoint(block, x);                       // for one call
//   using Block = fsdp2::CheckpointedHolder<BlockImpl>;                  // or for every call
//   auto block = fsdp2::checkpoint_wrapper(PlainBlock(64));              // or of one that is there
//   fsdp2::CheckpointOptions selective{.op_list = {"aten::addmm"}};      // all but these results
//
// Works with fully_shard in either order, and with its boundaries: a checkpointed function may call
// wrapped modules, and a wrapped module may checkpoint what it calls.

#include <fsdp2/detail/forward_shadow.h>
#include <fsdp2/for_each_tensor.h>
#include <fsdp2/fully_shard.h>

#include <ATen/core/function_schema.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp2 {

/// Whether results of an op are kept from the first run. MUST and PREFER do the same here.
enum class CheckpointPolicy { kMustSave, kPreferSave, kMustRecompute, kPreferRecompute };

/// One call of an op that a policy is asked about.
struct SelectiveCheckpointContext {
  const c10::FunctionSchema& op;  // op.name() is "aten::mm", op.overload_name() may be empty
  at::ArrayRef<c10::IValue> arguments;
};
using CheckpointPolicyFn = std::function<CheckpointPolicy(const SelectiveCheckpointContext&)>;

struct CheckpointOptions {
  /// Run the function again with the random numbers it had: those of the default generators of the
  /// CPU, of the devices of its arguments and of the current device.
  bool preserve_rng_state = true;
  /// End the second run, by an exception, once it has saved as many tensors as the first. False
  /// lets it run to its end; needed if the function swallows exceptions of all kinds.
  bool early_stop = true;
  /// Ops whose results are kept from the first run and handed out in place of being computed again:
  /// "aten::mm" (all overloads) or "aten::sum.dim_IntList". As in create_selective_checkpoint_
  /// contexts of Python. What runs below autograd counts: aten::linear calls aten::addmm or
  /// aten::mm. Errors when checkpoint is called: there is no such op, it only calls others, or its
  /// results are its arguments or views. Random numbers go on behind a kept op as they did at
  /// first. Results that were changed in place since are not used: the op runs again.
  std::vector<std::string> op_list{};
  /// Or a function that decides, in the first run, for each call of an op that makes its results.
  /// With sharding it has to decide alike on all ranks.
  CheckpointPolicyFn policy_fn{};
};

namespace detail {

using Recompute = std::function<void(std::vector<at::Tensor>& tensors)>;

/// While it lives, tensors that autograd saves in this thread are dropped; `recompute` is given
/// `inputs` again and has to save them once more.
class CheckpointScope {
 public:
  CheckpointScope(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                  Recompute recompute);
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;
  ~CheckpointScope();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A module by its forward, anything else as a function.
template <class Fn, class... Args>
decltype(auto) call_checkpointed(Fn&& fn, Args&&... args) {
  if constexpr (requires { fn->forward(std::forward<Args>(args)...); }) {
    return fn->forward(std::forward<Args>(args)...);
  } else {
    return std::invoke(std::forward<Fn>(fn), std::forward<Args>(args)...);
  }
}

/// An argument that was kept, as the caller had passed it.
template <class A, class Kept>
decltype(auto) as_passed(Kept& kept) {
  if constexpr (!std::is_lvalue_reference_v<A>) {
    return std::move(kept);
  } else if constexpr (std::is_const_v<std::remove_reference_t<A>>) {
    return std::as_const(kept);
  } else {
    return (kept);
  }
}

template <class Kept>
std::vector<at::Tensor> take_tensors(Kept& kept) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(
      kept, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); },
      [](const std::type_info&) {});
  return tensors;
}

}  // namespace detail

/// Returns fn(args...), or fn->forward(args...) for a module. Backward runs fn again, on the same
/// arguments, when it needs the first of the tensors that fn would have saved. Gradients, also of
/// parameters that fn captures, are those without checkpointing, bit for bit.
///
/// - fn and the arguments are copied and kept until the graph is freed. Tensors among the arguments
///   (found as fsdp2/for_each_tensor.h says) are kept as autograd keeps them: one that is changed
///   in place afterwards is an error in backward. What else fn refers to must still be there, and
///   the same.
/// - The second run has the random numbers and the autocast state of the first. Buffers that fn
///   updates (running statistics) are updated twice.
/// - It may return anything. Checkpoints nest; fn may run backward itself; retain_graph,
///   create_graph and torch::autograd::grad work, each backward computes again. Without grad mode
///   it is a plain call.
/// - Errors in backward: the second run saves another number of tensors, or tensors of other sizes,
///   dtypes or devices; a parameter it needs was changed in place since.
template <class Fn, class... Args>
decltype(auto) checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  static_assert(
      std::is_copy_constructible_v<std::decay_t<Fn>> &&
          (std::is_copy_constructible_v<std::decay_t<Args>> && ...),
      "fsdp2::checkpoint copies the function and its arguments, to call it again in backward: "
      "capture or pass what cannot be copied by std::shared_ptr");
  if (!at::GradMode::is_enabled()) {
    return detail::call_checkpointed(std::forward<Fn>(fn), std::forward<Args>(args)...);
  }
  using Kept = std::tuple<std::decay_t<Args>...>;
  const auto kept = std::make_shared<Kept>(std::as_const(args)...);
  const std::vector<at::Tensor> inputs = detail::take_tensors(*kept);
  const detail::CheckpointScope scope(
      options, inputs,
      [kept, again = std::decay_t<Fn>(std::as_const(fn)),
       inside = detail::open_boundaries()](std::vector<at::Tensor>& tensors) mutable {
        const detail::ReopenedBoundaries reopened(inside);
        size_t next = 0;
        for_each_tensor(
            *kept, [&](at::Tensor& tensor) { tensor = tensors[next++]; },
            [](const std::type_info&) {});
        Kept values = *kept;
        detail::take_tensors(*kept);
        std::apply(
            [&](auto&... value) {
              detail::call_checkpointed(again, detail::as_passed<Args>(value)...);
            },
            values);
      });
  return detail::call_checkpointed(std::forward<Fn>(fn), std::forward<Args>(args)...);
}
template <class Fn, class... Args>
  requires(!std::is_same_v<std::remove_cvref_t<Fn>, CheckpointOptions>)
decltype(auto) checkpoint(Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions(), std::forward<Fn>(fn), std::forward<Args>(args)...);
}

/// Impl with a forward() that is checkpointed. It is an Impl: constructors, members, parameter
/// names and saved state are Impl's. As with Hooked, calls through `Impl&` are plain calls, and
/// torch::nn::Sequential can hold it if forward is one function without default arguments.
/// Hooked<Checkpointed<Impl>> has its hooks and casts outside of what is run again,
/// Checkpointed<Hooked<Impl>> inside.
template <class Impl>
class Checkpointed : public Impl, public detail::ForwardShadow<Checkpointed<Impl>, Impl> {
  using Shadow = detail::ForwardShadow<Checkpointed<Impl>, Impl>;
  friend Shadow;

 public:
  using Impl::Impl;
  Checkpointed() = default;
  /// The same parameters, buffers and submodules as `module`, not copies.
  explicit Checkpointed(const Impl& module) : Impl(module) {}

  using Shadow::forward;
  CheckpointOptions checkpoint_options;

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    return detail::clone_as<Checkpointed, Impl>(Impl::clone(device));
  }

 private:
  template <class Callee, class... A>
  decltype(auto) around(const Callee& callee, A&&... arguments) {
    return checkpoint(
        checkpoint_options,
        [callee, alive = this->weak_from_this().lock()](auto&&... values) -> decltype(auto) {
          return callee(std::forward<decltype(values)>(values)...);
        },
        std::forward<A>(arguments)...);
  }
};

template <class Impl>
using CheckpointedHolder = detail::ShadowHolder<Checkpointed<Impl>>;

/// A checkpointed module in the place of `module`, with the same parameters and parameter names.
/// `module` itself is to be dropped. It has to be copyable, as clone() asks of it too, and may not
/// have been wrapped with fully_shard (its children may).
template <class Impl>
CheckpointedHolder<Impl> checkpoint_wrapper(const std::shared_ptr<Impl>& module,
                                            const CheckpointOptions& options = {}) {
  TORCH_CHECK(module, "checkpoint_wrapper: the module is null");
  TORCH_CHECK(!is_fsdp(*module), "checkpoint_wrapper: fully_shard was called on this ",
              module->name(),
              " already: call checkpoint_wrapper first and fully_shard on what it "
              "returns, or call the module by fsdp2::checkpoint(module, inputs...)");
  auto wrapper = std::make_shared<Checkpointed<Impl>>(static_cast<const Impl&>(*module));
  wrapper->checkpoint_options = options;
  return CheckpointedHolder<Impl>(std::move(wrapper));
}
template <class Impl>
CheckpointedHolder<Impl> checkpoint_wrapper(const torch::nn::ModuleHolder<Impl>& module,
                                            const CheckpointOptions& options = {}) {
  return checkpoint_wrapper(module.ptr(), options);
}

}  // namespace fsdp2
