#pragma once

// Modules with a boundary: a call of them is one event, at which hooks run and the casts of
// fully_shard's mixed precision are made, as in Python. libtorch's modules have none, as their
// forward() is a plain function. Follows torch.nn.Module.register_forward_hook
// (pytorch.org/docs/stable/generated/torch.nn.Module.html).
//
//   using Block = fsdp2::HookedHolder<BlockImpl>;     // in place of TORCH_MODULE(Block)
//   Block block(64);                                  // a BlockImpl, with the same parameters
//   block->register_forward_hook([](torch::nn::Module&, fsdp2::Values&, fsdp2::Values& output) {
//     output.get<torch::Tensor>() = output.get<torch::Tensor>().relu();
//   });
//   block(x); block->forward(x);                      // both pass the boundary
//
// fsdp2/nn.h has the modules of torch::nn so. Neither is needed for sharding: parameters gather
// where ops touch them.

#include <fsdp2/detail/boundary.h>
#include <fsdp2/detail/forward_shadow.h>

#include <functional>
#include <memory>
#include <vector>

namespace fsdp2 {

/// The arguments or the result of a call, as hooks see and change them. Valid during the hook.
class Values {
 public:
  size_t size() const { return values_.size(); }
  /// The value at `index`, to read or to assign to. Error if it is not a T: name the type without
  /// const or reference, as forward declares it.
  template <class T>
  T& get(size_t index = 0) {
    return *static_cast<T*>(at(index, typeid(T)));
  }

  template <class... T>
  explicit Values(std::tuple<T...>& values)
      : values_(std::apply(
            [](auto&... value) {
              return std::vector<Value>{
                  Value{&value, &typeid(std::remove_reference_t<decltype(value)>)}...};
            },
            values)) {}

 private:
  struct Value {
    void* address;
    const std::type_info* type;
  };
  void* at(size_t index, const std::type_info& type) const;
  std::vector<Value> values_;
};

/// What registering a hook returns. Dropping it leaves the hook in place.
class HookHandle {
 public:
  /// Takes the hook away; a second call, or one after the module is gone, does nothing.
  void remove();

  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}

 private:
  std::function<void()> remove_;
};

/// The hooks of one module. They run in the order in which they were registered, inside of the
/// casts: pre-hooks see inputs in `param_dtype`, forward hooks replace the output before it is cast
/// to `output_dtype`. What they throw leaves the call. Registering is not thread-safe with calls.
class ForwardHooks {
 public:
  using PreHook = std::function<void(torch::nn::Module& module, Values& inputs)>;
  using Hook = std::function<void(torch::nn::Module& module, Values& inputs, Values& output)>;

  /// Runs before forward, and may replace its inputs. (An argument that forward takes by non-const
  /// reference is the caller's own.)
  HookHandle register_forward_pre_hook(PreHook hook) { return add(pre_hooks_, std::move(hook)); }
  /// Runs after forward; may replace its output. `output` is empty if forward returns nothing.
  HookHandle register_forward_hook(Hook hook) { return add(hooks_, std::move(hook)); }

  bool empty() const { return pre_hooks_->empty() && hooks_->empty(); }
  template <class Inputs>
  void before(torch::nn::Module& module, Inputs& inputs) const {
    if (!pre_hooks_->empty()) run_before(module, Values(inputs));
  }
  template <class Inputs, class Output>
  void after(torch::nn::Module& module, Inputs& inputs, Output& output) const {
    if (!hooks_->empty()) run_after(module, Values(inputs), Values(output));
  }

 private:
  template <class F>
  using List = std::shared_ptr<std::vector<std::shared_ptr<F>>>;
  template <class F>
  static HookHandle add(const List<F>& list, F hook) {
    list->push_back(std::make_shared<F>(std::move(hook)));
    return HookHandle([weak = std::weak_ptr(list), added = list->back().get()] {
      const auto alive = weak.lock();
      if (alive) std::erase_if(*alive, [&](const auto& one) { return one.get() == added; });
    });
  }
  void run_before(torch::nn::Module& module, Values inputs) const;
  void run_after(torch::nn::Module& module, Values inputs, Values output) const;

  List<PreHook> pre_hooks_ = std::make_shared<List<PreHook>::element_type>();
  List<Hook> hooks_ = std::make_shared<List<Hook>::element_type>();
};

/// Impl with a boundary around forward(). It is an Impl: constructors, members, parameter names and
/// saved state are Impl's. Calls through `Impl&` or `Impl*` do not pass the boundary, as forward()
/// is not virtual; the casts are then made op by op (fsdp2/mixed_precision.h).
///
/// With a `param_dtype` and cast_forward_inputs, floating tensors in the arguments are cast to it;
/// with an `output_dtype`, those in the result. They are found as fsdp2/for_each_tensor.h says; an
/// argument of a type that cannot be searched is an error at the first call that wants a cast.
///
/// torch::nn::Sequential and AnyModule can hold it if Impl's forward is one function without
/// default arguments. clone() works if Impl's does; hooks stay with the original.
template <class Impl>
class Hooked : public Impl, public ForwardHooks, public detail::ForwardShadow<Hooked<Impl>, Impl> {
  using Shadow = detail::ForwardShadow<Hooked<Impl>, Impl>;
  friend Shadow;

 public:
  using Impl::Impl;
  Hooked() = default;
  /// The same parameters, buffers and submodules as `module`, not copies.
  explicit Hooked(const Impl& module) : Impl(module) {}

  using Shadow::forward;

  /// Calls another method through the same boundary, hooks included: call(&Impl::encode, x). Stands
  /// for register_fsdp_forward_method. (Sharding does not need it: parameters gather in any
  /// method.)
  template <class Method, class... A>
  auto call(Method method, A&&... arguments) {
    return detail::call_with(*this, hooks(), detail::bind_method<Impl>(*this, method),
                             std::forward<A>(arguments)...);
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    return detail::clone_as<Hooked, Impl>(Impl::clone(device));
  }

 private:
  const ForwardHooks& hooks() const { return *this; }
  template <class Callee, class... A>
  auto around(const Callee& callee, A&&... arguments) {
    return detail::call_with(*this, hooks(), callee, std::forward<A>(arguments)...);
  }
};

/// The holder of a Hooked<Impl>, as TORCH_MODULE makes one of an Impl.
template <class Impl>
using HookedHolder = detail::ShadowHolder<Hooked<Impl>>;

}  // namespace fsdp2
