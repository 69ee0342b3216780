#pragma once

// Python's pickles, protocol 2: every Python reads it, torch.load(weights_only=True) too.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp2::pickle {

/// Writes opcodes in the order of the calls. Strings and names of classes are written once and
/// referred to later.
class Writer {
 public:
  Writer();

  Writer& none();
  Writer& boolean(bool value);
  Writer& integer(int64_t value);
  Writer& real(double value);
  Writer& string(std::string_view value);
  Writer& bytes(std::string_view value);
  Writer& global(std::string_view module, std::string_view name);

  /// The values written since mark() become a tuple, are added to the list or, as keys and values,
  /// to the dict that was written before mark().
  Writer& mark();
  Writer& tuple();
  Writer& appends();
  Writer& set_items();
  Writer& empty_tuple();
  Writer& empty_list();
  Writer& empty_dict();
  Writer& tuple_of(const std::vector<int64_t>& values);

  /// The two values before are a callable and a tuple, a class and a tuple, an object and a state.
  Writer& reduce();
  Writer& new_object();
  Writer& build();
  Writer& persistent_id();

  /// The whole pickle.
  std::string finish();

 private:
  Writer& put(std::string_view text) {
    out_ += text;
    return *this;
  }
  template <class T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  /// Whether the value was written before; then it is referred to.
  bool recalled(const std::string& what);
  void memoize(const std::string& what);

  std::string out_;
  std::unordered_map<std::string, uint32_t> memo_;
};

}  // namespace fsdp2::pickle
