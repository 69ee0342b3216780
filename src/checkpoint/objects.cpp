#include "checkpoint/objects.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

namespace fsdp2::dcp {
namespace {

using pickle::Kind;
using pickle::Node;
using pickle::Unsupported;

class ObjectReader {
 public:
  ObjectReader(const pickle::Tree& tree, const TensorReader& tensors)
      : tree_(tree), tensors_(tensors), left_(kAtLeast + kMultiple * tree.length()) {}

  Value read(const Node& node, int depth = 0) {
    constexpr int deepest = 100;
    if (depth > deepest) throw Unsupported("a value nested more than 100 deep");
    take(sizeof(Value) + node.text.size());
    switch (node.kind) {
      case Kind::kNone:
        return None{};
      case Kind::kBool:
        return node.integer != 0;
      case Kind::kInt:
        return node.integer;
      case Kind::kFloat:
        return node.real;
      case Kind::kString:
        return std::string(node.text);
      case Kind::kBytes:
        return Bytes{std::string(node.text)};
      case Kind::kTuple:
        return Tuple{items(node, depth)};
      case Kind::kList:
        return items(node, depth);
      case Kind::kDict:
        return dict(node, depth);
      case Kind::kGlobal:
        throw Unsupported(name(node));
      case Kind::kCall:
        if (is_tensor(node)) return tensors_(node);
        if (const auto bytes = encoded_bytes(node)) return Bytes{*bytes};
        throw Unsupported(name(tree_.item(node, 0)));
      case Kind::kPersistent:
        throw Unsupported("a tensor inside of an object");
    }
    throw Unsupported("something unknown");
  }

 private:
  // A pickle may mention one value many times, a list in itself even; each becomes a copy.
  static constexpr size_t kAtLeast = size_t{1024} * 1024, kMultiple = 1000;
  void take(size_t bytes) {
    if (bytes > left_) throw Unsupported("values that take a thousand times their pickle's bytes");
    left_ -= bytes;
  }

  static std::string name(const Node& node) {
    if (node.kind != Kind::kGlobal) return "an object without a class";
    std::string name(node.text);
    std::replace(name.begin(), name.end(), ' ', '.');
    return name;
  }
  /// Protocol 2 has no bytes: they are text that Python encodes again, each byte as a character.
  std::optional<std::string> encoded_bytes(const Node& node) {
    const Node &function = tree_.item(node, 0), &arguments = tree_.item(node, 1);
    if (arguments.kind != Kind::kTuple) return std::nullopt;
    if (tree_.is_global(function, "__builtin__ bytes") && arguments.items.empty()) return "";
    if (!tree_.is_global(function, "_codecs encode") || arguments.items.size() != 2) {
      return std::nullopt;
    }
    const Node &text = tree_.item(arguments, 0), &codec = tree_.item(arguments, 1);
    if (text.kind != Kind::kString || codec.text != "latin1") return std::nullopt;
    take(text.text.size());
    std::string bytes;
    for (size_t i = 0; i < text.text.size(); ++i) {
      const auto first = static_cast<uint8_t>(text.text[i]);
      if (first < 0x80) {
        bytes += text.text[i];
        continue;
      }
      // The characters up to 255 are a byte of 0xc2 or 0xc3 and one of the lower six bits.
      if ((first != 0xc2 && first != 0xc3) || ++i == text.text.size()) return std::nullopt;
      const auto second = static_cast<uint8_t>(text.text[i]);
      bytes += static_cast<char>(first == 0xc2 ? second : second + 0x40);
    }
    return bytes;
  }
  bool is_tensor(const Node& node) const {
    const Node& function = tree_.item(node, 0);
    return tensors_ && (tree_.is_global(function, "torch._utils _rebuild_tensor_v2") ||
                        tree_.is_global(function, "torch._utils _rebuild_tensor_v3"));
  }
  std::vector<Value> items(const Node& node, int depth) {
    std::vector<Value> values;
    values.reserve(node.items.size());
    for (size_t i = 0; i < node.items.size(); ++i) {
      values.push_back(read(tree_.item(node, i), depth + 1));
    }
    return values;
  }
  Value dict(const Node& node, int depth) {
    StateDict dict;
    for (size_t i = 0; i < node.items.size(); i += 2) {
      const Node& key = tree_.item(node, i);
      if (key.kind != Kind::kString) throw Unsupported("a dict with keys that are not strings");
      take(sizeof(StateDict::Entry) + key.text.size());
      dict[std::string(key.text)] = read(tree_.item(node, i + 1), depth + 1);
    }
    return dict;
  }

  const pickle::Tree& tree_;
  const TensorReader& tensors_;
  size_t left_;  // bytes that values may still take
};

}  // namespace

Value value_of(const pickle::Tree& tree, const TensorReader& tensors) {
  return ObjectReader(tree, tensors).read(tree.root());
}

void write_value(const Value& value, pickle::Writer& out, const TensorWriter& tensors) {
  const auto write_all = [&](const std::vector<Value>& values) {
    out.mark();
    for (const Value& item : values) write_value(item, out, tensors);
  };
  if (value.is_none()) {
    out.none();
  } else if (value.is<bool>()) {
    out.boolean(value.to_bool());
  } else if (value.is<int64_t>()) {
    out.integer(value.to_int());
  } else if (value.is<double>()) {
    out.real(value.to_double());
  } else if (value.is<std::string>()) {
    out.string(value.to_string());
  } else if (value.is<Bytes>()) {
    out.bytes(std::get<Bytes>(value.variant()).data);
  } else if (value.is<Tuple>()) {
    write_all(value.items());
    out.tuple();
  } else if (value.is<List>()) {
    out.empty_list();
    write_all(value.items());
    out.appends();
  } else if (value.is_dict()) {
    out.empty_dict().mark();
    for (const auto& [key, item] : value.dict()) {
      out.string(key);
      write_value(item, out, tensors);
    }
    out.set_items();
  } else if (value.is_tensor() && tensors) {
    tensors(value.to_tensor(), out);
  } else {
    TORCH_CHECK_TYPE(false, "cannot save ", value.kind(), " inside of a tuple");
  }
}

std::string to_pickle(const Value& value) {
  pickle::Writer out;
  write_value(value, out);
  return out.finish();
}

Value from_pickle(std::string_view bytes) { return value_of(pickle::Tree(bytes)); }

}  // namespace fsdp2::dcp
