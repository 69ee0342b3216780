#include "support/op_arguments.h"

#include <torch/torch.h>

#include <algorithm>

namespace fsdp2::testing {
namespace {

using c10::TypeKind;
using torch::Tensor;
using Stack = std::vector<c10::IValue>;

Tensor make_tensor(int filling, int position) {
  auto real = [](std::vector<int64_t> sizes) { return torch::rand(sizes) * 0.8 + 0.1; };
  auto zeros = [](std::vector<int64_t> sizes) { return torch::zeros(sizes, torch::kLong); };
  const bool first = position == 0;
  switch (filling) {
    case 0:
      return real({4, 4});
    case 1:
      return first ? real({4, 4}) : zeros({4, 4});
    case 2:
      return first ? zeros({4}) : real({4, 4});
    case 3:
      return first ? real({1, 4, 4, 4}) : position == 1 ? real({4, 4, 1, 1}) : real({4});
    case 4:
      return real({4});
    case 5:
      return first ? real({4, 4}) : zeros({4});
    case 6:
      return real({2, 4, 4});
    case 7:
      return torch::randint(0, 2, {4, 4}, torch::kLong);
    case 8:
      return torch::randint(0, 2, {4, 4}).to(torch::kBool);
    case 9:
      return first ? real({4, 4}) : real({4});
    case 10:
      return real({1, 4, 4, 4});
    case 11:
      return torch::view_as_complex(real({4, 4, 2}));
    case 12:
      return real({});
    case 13:
      return first ? real({1, 4, 4, 4, 4}) : real({4, 4, 1, 1, 1});
    case 14:
      return real({4, 4}).to(torch::kBFloat16);
    default:
      return position < 2 ? real({4, 4}) : zeros({4});
  }
}

bool fill_list(const c10::Argument& argument, const c10::Type& element, const Filling& filling,
               Stack& out) {
  std::vector<int64_t> values = filling.integers;
  if (argument.N() && static_cast<int>(values.size()) != *argument.N()) {
    values.assign(static_cast<size_t>(*argument.N()), values.empty() ? 1 : values[0]);
  }
  switch (element.kind()) {
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      out.emplace_back(values);
      return true;
    case TypeKind::FloatType:
      out.emplace_back(std::vector<double>(values.size(), 0.5));
      return true;
    case TypeKind::BoolType: {
      c10::List<bool> list;
      for (size_t i = 0; i < std::max<size_t>(1, values.size()); ++i) list.push_back(true);
      out.emplace_back(list);
      return true;
    }
    default:
      return false;
  }
}

}  // namespace

std::optional<std::pair<Stack, std::vector<Slot>>> fill_arguments(const c10::FunctionSchema& schema,
                                                                  const Filling& filling) {
  Stack out;
  std::vector<Slot> slots;
  int position = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    c10::TypePtr type = argument.type();
    const bool optional = type->kind() == TypeKind::OptionalType;
    if (optional) type = type->castRaw<c10::OptionalType>()->getElementType();
    if (type->kind() == TypeKind::TensorType) {
      if (optional && filling.tensors != 3 && filling.tensors != 9 && filling.tensors != 13) {
        out.emplace_back();
        continue;
      }
      slots.push_back({i});
      out.emplace_back(make_tensor(filling.tensors, position++));
      continue;
    }
    if (type->kind() == TypeKind::ListType) {
      const auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == TypeKind::TensorType) {
        slots.push_back({i, 0});
        slots.push_back({i, 1});
        out.emplace_back(std::vector<Tensor>{make_tensor(filling.tensors, position),
                                             make_tensor(filling.tensors, position)});
        ++position;
        continue;
      }
      if (element->kind() == TypeKind::OptionalType) {
        c10::List<std::optional<Tensor>> list;
        list.push_back(make_tensor(filling.tensors, position++));
        slots.push_back({i, 0});
        out.emplace_back(list);
        continue;
      }
    }
    if (argument.default_value()) {
      out.push_back(*argument.default_value());
      continue;
    }
    if (optional) {
      out.emplace_back();
      continue;
    }
    switch (type->kind()) {
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        out.emplace_back(argument.name() == "dtype" ? int64_t{6} : filling.integer);
        break;
      case TypeKind::FloatType:
      case TypeKind::NumberType:
        out.emplace_back(0.5);
        break;
      case TypeKind::BoolType:
        out.emplace_back(false);
        break;
      case TypeKind::ScalarTypeType:
        out.emplace_back(int64_t{6});
        break;
      case TypeKind::DeviceObjType:
        out.emplace_back(c10::Device(c10::kCPU));
        break;
      case TypeKind::StringType:
        out.emplace_back(std::string("none"));
        break;
      case TypeKind::ListType:
        if (!fill_list(argument, *type->castRaw<c10::ListType>()->getElementType(), filling, out)) {
          return std::nullopt;
        }
        break;
      default:
        return std::nullopt;
    }
  }
  if (slots.empty()) return std::nullopt;
  return std::make_pair(std::move(out), std::move(slots));
}

}  // namespace fsdp2::testing
