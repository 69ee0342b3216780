#pragma once

// Python's pickles as trees. Reading one runs nothing: opcodes outside of a short list are errors,
// and what names a class or a function stays a name. Memory is bounded by a fixed multiple of the
// input's length.

#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::pickle {

/// Not a pickle, or a damaged one.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A sound pickle, as far as one can tell, of something that is not supported.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Kind : uint8_t {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kBytes,
  kTuple,
  kList,
  kDict,        // items: key, value, key, value, ...
  kGlobal,      // text: "module name"
  kCall,        // items: what is called, its arguments (a tuple); then states set on the result
  kPersistent,  // items: the id
};

using Ref = uint32_t;

struct Node {
  Kind kind = Kind::kNone;
  union {
    int64_t integer;  // of kBool too
    double real;
  };
  std::string_view text{};  // into the bytes that were parsed
  std::vector<Ref> items{};
  Node() : integer(0) {}
};

class Tree {
 public:
  /// `bytes` must outlive the tree. Throws Malformed or Unsupported.
  explicit Tree(std::string_view bytes);

  const Node& root() const { return nodes_[root_]; }
  /// Of the bytes and of the values in them: what a reader's memory is measured against.
  size_t length() const { return length_; }
  size_t size() const { return nodes_.size(); }
  const Node& operator[](Ref ref) const { return nodes_[ref]; }
  const Node& item(const Node& node, size_t index) const { return nodes_[node.items[index]]; }
  bool is_global(const Node& node, std::string_view name) const {
    return node.kind == Kind::kGlobal && node.text == name;
  }

 private:
  class Machine;
  std::vector<Node> nodes_;
  std::deque<std::string> names_;  // of globals
  size_t length_;
  Ref root_ = 0;
};

}  // namespace fsdp2::pickle
