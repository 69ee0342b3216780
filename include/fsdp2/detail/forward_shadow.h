#pragma once

// A forward() that hides the one of a module's class: libtorch's modules have no virtual forward.

#include <fsdp2/detail/boundary.h>

#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace fsdp2::detail {

template <class Method>
struct MethodTypes;
template <class R, class C, class... A>
struct MethodTypes<R (C::*)(A...)> {
  using Signature = R(A...);
};
template <class R, class C, class... A>
struct MethodTypes<R (C::*)(A...) const> {
  using Signature = R(A...);
};

/// void if forward is overloaded or a template.
template <class Impl>
auto signature_of_forward() {
  if constexpr (requires { typename MethodTypes<decltype(&Impl::forward)>::Signature; }) {
    return std::type_identity<typename MethodTypes<decltype(&Impl::forward)>::Signature>();
  } else {
    return std::type_identity<void>();
  }
}

template <class Impl, class... A>
inline constexpr bool kCallableWith =
    requires(Impl& module, A (*... make)()) { module.forward(make()...); };

template <class Impl, class Done, class... Left>
struct CallableWithoutLast;
template <class Impl, class... Done, class Next, class... Left>
struct CallableWithoutLast<Impl, void(Done...), Next, Left...>
    : CallableWithoutLast<Impl, void(Done..., Next), Left...> {};
template <class Impl, class... Done, class Last>
struct CallableWithoutLast<Impl, void(Done...), Last>
    : std::bool_constant<kCallableWith<Impl, Done...>> {};

/// Whether forward can be called with fewer arguments than it declares.
template <class Impl, class Signature>
struct HasDefaults : std::false_type {};
template <class Impl, class R, class First, class... Rest>
struct HasDefaults<Impl, R(First, Rest...)> : CallableWithoutLast<Impl, void(), First, Rest...> {};

template <class Impl, class Signature>
using TypedSignature = std::conditional_t<HasDefaults<Impl, Signature>::value, void, Signature>;

/// Declares forward as Impl does where that is one function without default arguments, so that
/// torch::nn::Sequential and AnyModule can hold the class; else as a template. Goes on to
/// Derived::around(callee, arguments...).
template <class Derived, class Impl,
          class Signature =
              TypedSignature<Impl, typename decltype(signature_of_forward<Impl>())::type>>
class ForwardShadow {
 public:
  template <class... A>
  auto forward(A&&... arguments)
      -> std::decay_t<decltype(std::declval<Impl&>().forward(std::forward<A>(arguments)...))> {
    Derived& self = static_cast<Derived&>(*this);
    return self.around(bind_forward<Impl>(self), std::forward<A>(arguments)...);
  }
};

template <class Derived, class Impl, class R, class... A>
class ForwardShadow<Derived, Impl, R(A...)> {
 public:
  std::decay_t<R> forward(A... arguments) {
    Derived& self = static_cast<Derived&>(*this);
    return self.around(bind_forward<Impl>(self), std::forward<A>(arguments)...);
  }
};

/// A fresh Impl, made by Impl::clone, as the class that derives from it.
template <class Derived, class Impl>
std::shared_ptr<torch::nn::Module> clone_as(std::shared_ptr<torch::nn::Module> copy) {
  if constexpr (std::is_copy_constructible_v<Impl>) {
    return std::make_shared<Derived>(dynamic_cast<const Impl&>(*copy));
  }
  return copy;
}

/// A ModuleHolder that can be called whatever forward looks like.
template <class Module>
class ShadowHolder : public torch::nn::ModuleHolder<Module> {
 public:
  using torch::nn::ModuleHolder<Module>::ModuleHolder;
  using Impl = Module;

  template <class... A>
  auto operator()(A&&... arguments) {
    return this->get()->forward(std::forward<A>(arguments)...);
  }
};

}  // namespace fsdp2::detail
