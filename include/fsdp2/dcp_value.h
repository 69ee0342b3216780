#pragma once

// What a checkpoint holds: names mapped to tensors, plain values, lists and further maps. The
// counterpart of the nested dict that Python passes to torch.distributed.checkpoint
// (pytorch.org/docs/stable/distributed.checkpoint.html).
//
//   dcp::StateDict state;
//   state["model"] = get_model_state_dict(model);
//   state["epoch"] = 3;
//   state["history"] = dcp::List{0.5, 0.25};

#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp2::dcp {

class Value;
class Stateful;

/// Python's None.
struct None {
  bool operator==(const None&) const = default;
};
/// Python's bytes.
struct Bytes {
  std::string data;
  bool operator==(const Bytes&) const = default;
};
/// A Python object that C++ has no counterpart of, as torch.save wrote it. It can be saved again.
struct Pickled {
  std::string archive;
  std::string what;  // why it could not be read: "numpy.ndarray", say
  bool operator==(const Pickled& other) const { return archive == other.archive; }
};
using List = std::vector<Value>;
struct Tuple {
  std::vector<Value> items;
};

/// Names in the order in which they came, as Python's dict. Copies share tensors. References stay
/// good until their entry is erased.
class StateDict {
 public:
  using Entry = std::pair<std::string, Value>;

  StateDict();
  StateDict(std::initializer_list<Entry> entries);
  StateDict(const StateDict& other);
  StateDict(StateDict&& other) noexcept;
  StateDict& operator=(StateDict other) noexcept;
  ~StateDict();

  /// The value under `key`; a new one, None, is added at the end if there is none.
  Value& operator[](const std::string& key);
  /// Error naming `key`, and those most like it, if there is none.
  Value& at(const std::string& key);
  const Value& at(const std::string& key) const;
  /// Null if there is none.
  Value* find(const std::string& key);
  const Value* find(const std::string& key) const;
  bool contains(const std::string& key) const { return find(key) != nullptr; }
  /// Whether there was one.
  bool erase(const std::string& key);
  void clear();
  size_t size() const;
  bool empty() const { return size() == 0; }
  std::vector<std::string> keys() const;

  std::list<Entry>::iterator begin();
  std::list<Entry>::iterator end();
  std::list<Entry>::const_iterator begin() const;
  std::list<Entry>::const_iterator end() const;

 private:
  void make_index();
  void swap(StateDict& other) noexcept;

  std::list<Entry> entries_;
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
};

/// One of the above. Reading it as what it is not is an error that says what it is.
class Value {
 public:
  using Variant = std::variant<None, bool, int64_t, double, std::string, Bytes, torch::Tensor, List,
                               Tuple, StateDict, Pickled, std::shared_ptr<Stateful>>;

  Value() = default;
  Value(None) {}                                           // NOLINT
  Value(std::same_as<bool> auto value) : value_(value) {}  // NOLINT
  Value(std::integral auto value)                          // NOLINT
    requires(!std::same_as<decltype(value), bool>)
      : value_(static_cast<int64_t>(value)) {}
  Value(std::floating_point auto value) : value_(static_cast<double>(value)) {}  // NOLINT
  Value(std::string value) : value_(std::move(value)) {}                         // NOLINT
  Value(const char* value) : value_(std::string(value)) {}                       // NOLINT
  Value(Bytes value) : value_(std::move(value)) {}                               // NOLINT
  Value(torch::Tensor value) : value_(std::move(value)) {}                       // NOLINT
  Value(List value) : value_(std::move(value)) {}                                // NOLINT
  Value(Tuple value) : value_(std::move(value)) {}                               // NOLINT
  Value(StateDict value) : value_(std::move(value)) {}                           // NOLINT
  Value(Pickled value) : value_(std::move(value)) {}                             // NOLINT
  template <std::derived_from<Stateful> T>
  Value(std::shared_ptr<T> value)  // NOLINT
      : value_(std::shared_ptr<Stateful>(std::move(value))) {}

  const Variant& variant() const { return value_; }
  template <class T>
  bool is() const {
    return std::holds_alternative<T>(value_);
  }
  bool is_none() const { return is<None>(); }
  bool is_tensor() const { return is<torch::Tensor>(); }
  bool is_dict() const { return is<StateDict>(); }

  bool to_bool() const;
  int64_t to_int() const;
  /// Of an integer too.
  double to_double() const;
  const std::string& to_string() const;
  const torch::Tensor& to_tensor() const;
  /// Of a List or a Tuple.
  const std::vector<Value>& items() const;
  StateDict& dict();
  const StateDict& dict() const;

  /// dict()[key]; a None becomes an empty dict first.
  Value& operator[](const std::string& key);
  const Value& at(const std::string& key) const { return dict().at(key); }

  /// "int", "tensor of 3 x 4 float", ...: for messages.
  std::string kind() const;

 private:
  Variant value_;
};

/// As Python would print it; of a tensor only what kind() says.
std::string to_text(const Value& value);

/// Something with state of its own that rides along in a checkpoint (a data loader, a schedule):
/// put it into a StateDict by shared_ptr. As torch.distributed.checkpoint.stateful.Stateful.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Called when saving, on all ranks.
  virtual StateDict state_dict() = 0;
  /// Called when loading, before anything is read: what is to be filled. `saved_keys` are the keys
  /// that the checkpoint has below this object's, flattened ("epoch", "history.0").
  virtual StateDict state_dict_to_load(const std::vector<std::string>& saved_keys);
  /// Called once that has been filled.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace fsdp2::dcp
