#include "checkpoint/near_names.h"

#include <fsdp2/dcp_value.h>
#include <fsdp2/dtensor.h>

#include <algorithm>
#include <cstdio>

namespace fsdp2::dcp {

StateDict::StateDict() = default;
StateDict::StateDict(std::initializer_list<Entry> entries) {
  for (const Entry& entry : entries) (*this)[entry.first] = entry.second;
}
StateDict::StateDict(const StateDict& other) : entries_(other.entries_) { make_index(); }
// The lists' nodes, to which the index points, move with them.
StateDict::StateDict(StateDict&& other) noexcept { swap(other); }
StateDict& StateDict::operator=(StateDict other) noexcept {
  swap(other);
  return *this;
}
void StateDict::swap(StateDict& other) noexcept {
  entries_.swap(other.entries_);
  index_.swap(other.index_);
}
void StateDict::make_index() {
  for (auto at = entries_.begin(); at != entries_.end(); ++at) index_.emplace(at->first, at);
}
StateDict::~StateDict() = default;

Value& StateDict::operator[](const std::string& key) {
  const auto place = index_.find(key);
  if (place != index_.end()) return place->second->second;
  index_.emplace(key, entries_.emplace(entries_.end(), key, Value()));
  return entries_.back().second;
}
const Value* StateDict::find(const std::string& key) const {
  const auto place = index_.find(key);
  return place == index_.end() ? nullptr : &place->second->second;
}
Value* StateDict::find(const std::string& key) {
  return const_cast<Value*>(std::as_const(*this).find(key));
}
const Value& StateDict::at(const std::string& key) const {
  const Value* value = find(key);
  TORCH_CHECK_INDEX(value != nullptr, "there is no ", key, near_names(key, keys()));
  return *value;
}
Value& StateDict::at(const std::string& key) {
  return const_cast<Value&>(std::as_const(*this).at(key));
}
bool StateDict::erase(const std::string& key) {
  const auto place = index_.find(key);
  if (place == index_.end()) return false;
  entries_.erase(place->second);
  index_.erase(place);
  return true;
}
void StateDict::clear() { *this = StateDict(); }
size_t StateDict::size() const { return entries_.size(); }
std::vector<std::string> StateDict::keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : entries_) keys.push_back(key);
  return keys;
}
std::list<StateDict::Entry>::iterator StateDict::begin() { return entries_.begin(); }
std::list<StateDict::Entry>::iterator StateDict::end() { return entries_.end(); }
std::list<StateDict::Entry>::const_iterator StateDict::begin() const { return entries_.begin(); }
std::list<StateDict::Entry>::const_iterator StateDict::end() const { return entries_.end(); }

namespace {

template <class T>
const T& as(const Value& value, const char* wanted) {
  const T* held = std::get_if<T>(&value.variant());
  TORCH_CHECK_TYPE(held != nullptr, "expected ", wanted, ", got ", value.kind());
  return *held;
}

}  // namespace

bool Value::to_bool() const { return as<bool>(*this, "a bool"); }
int64_t Value::to_int() const { return as<int64_t>(*this, "an int"); }
double Value::to_double() const {
  return is<int64_t>() ? static_cast<double>(to_int()) : as<double>(*this, "a float");
}
const std::string& Value::to_string() const { return as<std::string>(*this, "a str"); }
const torch::Tensor& Value::to_tensor() const { return as<torch::Tensor>(*this, "a tensor"); }
const std::vector<Value>& Value::items() const {
  return is<Tuple>() ? std::get<Tuple>(value_).items : as<List>(*this, "a list or a tuple");
}
const StateDict& Value::dict() const { return as<StateDict>(*this, "a dict"); }
StateDict& Value::dict() { return const_cast<StateDict&>(std::as_const(*this).dict()); }

Value& Value::operator[](const std::string& key) {
  if (is_none()) value_ = StateDict();
  return dict()[key];
}

std::string Value::kind() const {
  static const char* const names[] = {"None",   "bool", "int",   "float", "str",    "bytes",
                                      "tensor", "list", "tuple", "dict",  "object", "Stateful"};
  if (is<Pickled>()) return c10::str("a Python object (", std::get<Pickled>(value_).what, ")");
  if (!is_tensor()) return names[value_.index()];
  const torch::Tensor& tensor = to_tensor();
  if (!tensor.defined()) return "undefined tensor";
  return c10::str("tensor of ", tensor.sizes(), " ", tensor.scalar_type());
}

std::string to_text(const Value& value) {
  const auto join = [](const std::vector<Value>& values) {
    std::string text;
    for (const Value& item : values) text += (text.empty() ? "" : ", ") + to_text(item);
    return text;
  };
  if (value.is<bool>()) return value.to_bool() ? "True" : "False";
  if (value.is<int64_t>()) return std::to_string(value.to_int());
  if (value.is<double>()) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.17g", value.to_double());
    return text;
  }
  if (value.is<std::string>()) return "'" + value.to_string() + "'";
  if (value.is<List>()) return "[" + join(value.items()) + "]";
  if (value.is<Tuple>()) return "(" + join(value.items()) + ")";
  if (!value.is_dict()) return value.kind();
  std::string text;
  for (const auto& [key, item] : value.dict()) {
    text += (text.empty() ? "'" : ", '") + key + "': " + to_text(item);
  }
  return "{" + text + "}";
}

StateDict Stateful::state_dict_to_load(const std::vector<std::string>&) { return state_dict(); }

}  // namespace fsdp2::dcp
