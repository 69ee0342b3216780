#include "checkpoint/flatten.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

namespace fsdp2::dcp {
namespace {

std::string joined(const std::vector<PathPart>& path) {
  std::string key;
  for (const PathPart& part : path) {
    if (&part != &path.front()) key += '.';
    key += std::holds_alternative<std::string>(part) ? std::get<std::string>(part)
                                                     : std::to_string(std::get<int64_t>(part));
  }
  return key;
}

bool holds_tensor(const Value& value) {
  const auto any = [](const std::vector<Value>& values) {
    return std::any_of(values.begin(), values.end(), holds_tensor);
  };
  if (value.is<List>()) return any(value.items());
  if (!value.is_dict()) return value.is_tensor();
  return std::any_of(value.dict().begin(), value.dict().end(),
                     [](const auto& entry) { return holds_tensor(entry.second); });
}

/// Whether the list holds what is not a leaf itself, or a tensor.
bool is_descended(const Value& list) {
  return std::any_of(list.items().begin(), list.items().end(), [](const Value& item) {
    return item.is_dict() || item.is_tensor() || (item.is<List>() && is_descended(item));
  });
}

class Flattener {
 public:
  explicit Flattener(bool whole_lists) : whole_lists_(whole_lists) {}

  void visit(Value& value) {
    if (value.is_dict()) {
      for (auto& [key, item] : value.dict()) below(key, item);
    } else if (value.is<List>() && (whole_lists_ ? holds_tensor(value) : is_descended(value))) {
      int64_t index = 0;
      for (const Value& item : value.items()) below(index++, const_cast<Value&>(item));
    } else {
      add(value);
    }
  }
  void below(PathPart part, Value& value) {
    path_.push_back(std::move(part));
    visit(value);
    path_.pop_back();
  }

  std::vector<Leaf> leaves;

 private:
  void add(Value& value) {
    std::string key = joined(path_);
    TORCH_CHECK_VALUE(keys_.insert(key).second, "two values of the state dict have the flat name ",
                      key);
    leaves.push_back({std::move(key), path_, &value});
  }

  const bool whole_lists_;
  std::vector<PathPart> path_;
  std::unordered_set<std::string> keys_;
};

}  // namespace

std::vector<Leaf> flatten(StateDict& state, bool whole_lists) {
  Flattener flattener(whole_lists);
  for (auto& [key, value] : state) flattener.below(key, value);
  return std::move(flattener.leaves);
}

void set_at(Value& root, const std::vector<PathPart>& path, Value value) {
  constexpr int64_t longest_list = 1'000'000;
  Value* at = &root;
  for (const PathPart& part : path) {
    if (const auto* name = std::get_if<std::string>(&part)) {
      TORCH_CHECK_VALUE(at->is_none() || at->is_dict(), joined(path), " lies below ", at->kind());
      at = &(*at)[*name];
      continue;
    }
    const int64_t index = std::get<int64_t>(part);
    TORCH_CHECK_VALUE(index < longest_list, joined(path), " is at an implausible place of a list");
    if (at->is_none()) *at = List();
    TORCH_CHECK_VALUE(at->is<List>(), joined(path), " lies below ", at->kind());
    auto& items = const_cast<std::vector<Value>&>(at->items());
    if (items.size() <= static_cast<size_t>(index)) items.resize(static_cast<size_t>(index) + 1);
    at = &items[static_cast<size_t>(index)];
  }
  *at = std::move(value);
}

bool starts_with(const std::vector<PathPart>& path, const std::vector<PathPart>& prefix) {
  return path.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), path.begin());
}

bool is_below(const std::string& key, const std::string& prefix) {
  return key.starts_with(prefix) && (key.size() == prefix.size() || prefix.ends_with('.') ||
                                     prefix.empty() || key[prefix.size()] == '.');
}

}  // namespace fsdp2::dcp
