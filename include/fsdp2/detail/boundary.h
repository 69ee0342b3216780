#pragma once

// A call of a module as one event: the casts of its mixed precision policy, and hooks, around it.

#include <fsdp2/for_each_tensor.h>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace fsdp2::detail {

/// The wrapped modules (what is known of them) whose boundaries this thread is inside of.
using OpenBoundaries = std::vector<std::shared_ptr<const void>>;
OpenBoundaries& open_boundaries();

/// Brings them back, for a part of a call that runs again later.
class ReopenedBoundaries {
 public:
  explicit ReopenedBoundaries(OpenBoundaries wanted) : before_(std::move(wanted)) {
    before_.swap(open_boundaries());
  }
  ReopenedBoundaries(const ReopenedBoundaries&) = delete;
  ReopenedBoundaries& operator=(const ReopenedBoundaries&) = delete;
  ~ReopenedBoundaries() { before_.swap(open_boundaries()); }

 private:
  OpenBoundaries before_;
};

/// Open while a module is being called. Until it closes, parameters of the module's own group are
/// not cast to where they meet other dtypes: what arrives has been cast.
class Boundary {
 public:
  explicit Boundary(const torch::nn::Module& module);
  Boundary(const Boundary&) = delete;
  Boundary& operator=(const Boundary&) = delete;
  ~Boundary();

  /// What the policy wants of the module's inputs and outputs; nothing if it is not wrapped.
  const std::optional<c10::ScalarType>& input_dtype() const { return input_dtype_; }
  const std::optional<c10::ScalarType>& output_dtype() const { return output_dtype_; }

  static void cast(at::Tensor& tensor, c10::ScalarType dtype);
  [[noreturn]] void refuse(const std::type_info& type, c10::ScalarType dtype) const;

  template <class T>
  void cast_all(T& value, c10::ScalarType dtype) const {
    for_each_tensor(
        value, [&](at::Tensor& tensor) { cast(tensor, dtype); },
        [&](const std::type_info& type) { refuse(type, dtype); });
  }

 private:
  const torch::nn::Module& module_;
  std::optional<c10::ScalarType> input_dtype_, output_dtype_;
  bool wrapped_ = false;
};

/// How an argument waits for the call. What the callee takes by non-const reference stays the
/// caller's.
template <class A>
using Kept = std::conditional_t<std::is_lvalue_reference_v<A> &&
                                    !std::is_const_v<std::remove_reference_t<A>>,
                                A, std::decay_t<A>>;

/// The kept argument as the callee takes it; a copy of it if it is needed afterwards.
template <class A>
decltype(auto) pass(Kept<A>& kept, bool again) {
  if constexpr (std::is_reference_v<Kept<A>>) {
    return static_cast<A>(kept);
  } else if constexpr (std::is_lvalue_reference_v<A>) {
    return std::as_const(kept);
  } else if constexpr (std::is_copy_constructible_v<Kept<A>>) {
    return again ? Kept<A>(kept) : Kept<A>(std::move(kept));
  } else {
    return Kept<A>(std::move(kept));
  }
}

struct NoHooks {
  bool empty() const { return true; }
  template <class Inputs>
  void before(torch::nn::Module&, Inputs&) const {}
  template <class Inputs, class Output>
  void after(torch::nn::Module&, Inputs&, Output&) const {}
};

template <class A>
void cast_kept(const Boundary& boundary, Kept<A>& kept) {
  if constexpr (!std::is_reference_v<Kept<A>>) boundary.cast_all(kept, *boundary.input_dtype());
}

/// callee(arguments...) with the boundary around it: inputs are cast, hooks run, the callee, hooks,
/// outputs are cast.
template <class Hooks, class Callee, class... A>
auto call_through(torch::nn::Module& module, const Hooks& hooks, const Callee& callee,
                  A&&... arguments) {
  using Result = std::decay_t<decltype(callee(std::declval<A>()...))>;
  const Boundary boundary(module);
  const auto run = [&]() -> Result {
    if (!boundary.input_dtype() && hooks.empty()) return callee(std::forward<A>(arguments)...);
    std::tuple<Kept<A>...> kept(std::forward<A>(arguments)...);
    const auto with_kept = [&]<size_t... I>(std::index_sequence<I...>) -> Result {
      if (boundary.input_dtype()) (cast_kept<A>(boundary, std::get<I>(kept)), ...);
      hooks.before(module, kept);
      return callee(pass<A>(std::get<I>(kept), !hooks.empty())...);
    };
    if constexpr (std::is_void_v<Result>) {
      with_kept(std::index_sequence_for<A...>());
      std::tuple<> nothing;
      hooks.after(module, kept, nothing);
    } else {
      std::tuple<Result> output(with_kept(std::index_sequence_for<A...>()));
      hooks.after(module, kept, output);
      return std::get<0>(std::move(output));
    }
  };
  if constexpr (std::is_void_v<Result>) {
    run();
  } else {
    Result result = run();
    if (boundary.output_dtype()) boundary.cast_all(result, *boundary.output_dtype());
    return result;
  }
}

template <class A>
using AsConst =
    std::conditional_t<std::is_lvalue_reference_v<A>, const std::remove_reference_t<A>&, A&&>;

/// The same for arguments as a user wrote them: an lvalue is passed as const if the callee takes
/// that, so that it can be cast.
template <class Hooks, class Callee, class... A>
auto call_with(torch::nn::Module& module, const Hooks& hooks, const Callee& callee,
               A&&... arguments) {
  if constexpr (std::is_invocable_v<const Callee&, AsConst<A>...>) {
    return call_through(module, hooks, callee, static_cast<AsConst<A>>(arguments)...);
  } else {
    return call_through(module, hooks, callee, std::forward<A>(arguments)...);
  }
}

/// A method of a module, or its forward, as something to call. Never virtual dispatch to a forward
/// that hides it.
template <class Impl, class Method>
auto bind_method(Impl& module, Method method) {
  return [&module,
          method](auto&&... values) -> std::invoke_result_t<Method, Impl&, decltype(values)...> {
    return std::invoke(method, module, std::forward<decltype(values)>(values)...);
  };
}
template <class ItsClass>
auto bind_forward(ItsClass& module) {
  return [&module](auto&&... values) -> decltype(module.ItsClass::forward(
                                         std::forward<decltype(values)>(values)...)) {
    return module.ItsClass::forward(std::forward<decltype(values)>(values)...);
  };
}

}  // namespace fsdp2::detail
