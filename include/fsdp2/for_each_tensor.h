#pragma once

// Finding the tensors in the values that modules take and return. Stands for torch.utils._pytree.
//
// Searched: tensors; std::optional, variant, pair, tuple, array, vector, list, deque; the values of
// maps (std::map, std::unordered_map, c10::Dict, torch::OrderedDict); c10::List. Arithmetic types,
// enums, strings and the like hold none. A struct of your own opts in with one function in its own
// namespace, which names the fields that may hold tensors:
//
//   struct Output { torch::Tensor logits; std::optional<torch::Tensor> aux; int64_t steps; };
//   template <class Visit>
//   void fsdp2_for_each_tensor(Output& output, Visit&& visit) { visit(output.logits, output.aux); }

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Type.h>
#include <torch/ordered_dict.h>

#include <array>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp2 {

/// Whether values of T hold no tensors. Specialise it for a type of yours that holds none.
template <class T>
struct HoldsNoTensors : std::bool_constant<std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                                           std::is_convertible_v<const T&, std::string_view>> {};
template <>
struct HoldsNoTensors<std::nullptr_t> : std::true_type {};
template <>
struct HoldsNoTensors<std::nullopt_t> : std::true_type {};
template <>
struct HoldsNoTensors<std::monostate> : std::true_type {};
template <>
struct HoldsNoTensors<at::Scalar> : std::true_type {};
template <>
struct HoldsNoTensors<at::Device> : std::true_type {};
template <>
struct HoldsNoTensors<at::TensorOptions> : std::true_type {};
template <>
struct HoldsNoTensors<at::Generator> : std::true_type {};
template <class T>
struct HoldsNoTensors<c10::ArrayRef<T>> : HoldsNoTensors<T> {};
template <class T>
struct HoldsNoTensors<c10::OptionalArrayRef<T>> : HoldsNoTensors<T> {};

namespace detail {

/// Calls `leaf(tensor)` for each tensor in some values, and `unknown(type)` for each value of a
/// type that cannot be searched.
template <class Leaf, class Unknown>
struct TensorVisitor;

template <class T, class Visitor>
concept HasOwnSearch =
    requires(T& value, Visitor& visitor) { fsdp2_for_each_tensor(value, visitor); };

template <class T>
struct IsSequence : std::false_type {};
template <class T, class A>
struct IsSequence<std::vector<T, A>> : std::true_type {};
template <class T, class A>
struct IsSequence<std::list<T, A>> : std::true_type {};
template <class T, class A>
struct IsSequence<std::deque<T, A>> : std::true_type {};
template <class T, size_t N>
struct IsSequence<std::array<T, N>> : std::true_type {};

template <class Leaf, class Unknown>
struct TensorVisitor {
  Leaf leaf;
  Unknown unknown;

  template <class... Ts>
  void operator()(Ts&... values) {
    (visit(values), ...);
  }

 private:
  template <class T>
  void visit(T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      leaf(value);
    } else if constexpr (HasOwnSearch<T, TensorVisitor>) {
      fsdp2_for_each_tensor(value, *this);
    } else if constexpr (IsSequence<T>::value) {
      if constexpr (!HoldsNoTensors<typename T::value_type>::value) {
        for (auto& element : value) visit(element);
      }
    } else if constexpr (!HoldsNoTensors<T>::value) {
      open(value);
    }
  }

  template <class T>
  void open(T&) {
    unknown(typeid(T));
  }
  template <class T>
  void open(std::optional<T>& value) {
    if (value) visit(*value);
  }
  template <class A, class B>
  void open(std::pair<A, B>& value) {
    (*this)(value.first, value.second);
  }
  template <class... Ts>
  void open(std::tuple<Ts...>& value) {
    std::apply([this](auto&... elements) { (*this)(elements...); }, value);
  }
  template <class... Ts>
  void open(std::variant<Ts...>& value) {
    std::visit([this](auto& held) { (*this)(held); }, value);
  }
  template <class K, class V, class... Rest>
  void open(std::map<K, V, Rest...>& value) {
    for (auto& entry : value) visit(entry.second);
  }
  template <class K, class V, class... Rest>
  void open(std::unordered_map<K, V, Rest...>& value) {
    for (auto& entry : value) visit(entry.second);
  }
  template <class K, class V>
  void open(torch::OrderedDict<K, V>& value) {
    for (auto& item : value) visit(item.value());
  }
  // These two are handles: what others hold stays as it is.
  template <class K, class V>
  void open(c10::Dict<K, V>& value) {
    value = value.copy();
    for (auto entry = value.begin(); entry != value.end(); ++entry) {
      V element = entry->value();
      visit(element);
      entry->setValue(std::move(element));
    }
  }
  template <class T>
  void open(c10::List<T>& value) {
    value = value.copy();
    for (size_t i = 0; i < value.size(); ++i) {
      T element = value.get(i);
      visit(element);
      value.set(i, std::move(element));
    }
  }
};

}  // namespace detail

/// Calls `leaf(at::Tensor&)` for each tensor in `value`, undefined ones included, always in the
/// same order; it may replace them. `unknown(const std::type_info&)` hears of each value whose type
/// cannot be searched.
template <class T, class Leaf, class Unknown>
void for_each_tensor(T& value, Leaf&& leaf, Unknown&& unknown) {
  detail::TensorVisitor<Leaf&, Unknown&> visitor{leaf, unknown};
  visitor(value);
}

}  // namespace fsdp2
