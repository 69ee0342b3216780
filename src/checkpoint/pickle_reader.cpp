#include "checkpoint/pickle_reader.h"

#include <c10/util/StringUtil.h>

#include <bit>
#include <cstring>
#include <deque>
#include <limits>

namespace fsdp2::pickle {

// The opcodes of docs.python.org/3/library/pickletools.html that pickles of plain values, of
// tensors and of dataclasses are made of.
class Tree::Machine {
 public:
  Machine(std::string_view bytes, std::vector<Node>& nodes, std::deque<std::string>& names)
      : bytes_(bytes), nodes_(nodes), names_(names) {}

  Ref run() {
    while (true) {
      const auto opcode = static_cast<uint8_t>(take(1)[0]);
      if (opcode == '.') break;
      step(opcode);
    }
    if (stack_.size() != 1 || !marks_.empty()) fail("it ends with values left over");
    return stack_.back();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Malformed(c10::str("a damaged pickle: ", what, " (at byte ", at_, ")"));
  }

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - at_) fail("it ends too early");
    const auto part = bytes_.substr(at_, count);
    at_ += count;
    return part;
  }
  template <class T>
  T little() {
    T value;
    const std::string_view bytes = take(sizeof(T));
    std::memcpy(&value, bytes.begin(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) fail("it ends too early");
    const auto part = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return part;
  }

  Node& push(Kind kind) {
    stack_.push_back(static_cast<Ref>(nodes_.size()));
    nodes_.emplace_back();
    nodes_.back().kind = kind;
    return nodes_.back();
  }
  void push_integer(int64_t value, Kind kind = Kind::kInt) { push(kind).integer = value; }
  void push_text(std::string_view text, Kind kind = Kind::kString) { push(kind).text = text; }
  void push_global(std::string_view module, std::string_view name) {
    // The two may be values that are mentioned often.
    constexpr size_t longest = 1000;
    if (module.size() + name.size() > longest) fail("a class with a name of over 1000 characters");
    names_.push_back(c10::str(module, ' ', name));
    push_text(names_.back(), Kind::kGlobal);
  }

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Ref pop() {
    if (stack_.size() <= floor()) fail("a value is missing");
    const Ref top = stack_.back();
    stack_.pop_back();
    return top;
  }
  Node& top(Kind kind) {
    if (stack_.size() <= floor()) fail("a value is missing");
    Node& node = nodes_[stack_.back()];
    if (node.kind == Kind::kCall && kind != Kind::kCall) throw Unsupported("an object with items");
    if (node.kind != kind) fail("an opcode does not fit the value that it works on");
    return node;
  }
  std::vector<Ref> pop_to_mark() {
    if (marks_.empty()) fail("a mark is missing");
    std::vector<Ref> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                           stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t count) {
    std::vector<Ref> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(Kind::kTuple).items = std::move(items);
  }
  void extend(Kind kind, const std::vector<Ref>& items) {
    if (kind == Kind::kDict && items.size() % 2 != 0) fail("a key has no value");
    auto& to = top(kind).items;
    to.insert(to.end(), items.begin(), items.end());
  }
  void call() {
    const Ref arguments = pop();
    const Ref callee = pop();
    if (nodes_[callee].kind == Kind::kGlobal && nodes_[callee].text == "collections OrderedDict" &&
        nodes_[arguments].kind == Kind::kTuple && nodes_[arguments].items.empty()) {
      push(Kind::kDict);
      return;
    }
    push(Kind::kCall).items = {callee, arguments};
  }

  void memoize(uint64_t index) {
    if (stack_.size() <= floor()) fail("a value is missing");
    if (index >= memo_.size()) {
      if (index > bytes_.size()) fail("it numbers more values than it can hold");
      memo_.resize(index + 1, kNotThere);
    }
    if (memo_[index] == kNotThere) ++memoized_;
    memo_[index] = stack_.back();
  }
  void recall(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNotThere) {
      fail("it refers to a value that is not there");
    }
    stack_.push_back(memo_[index]);
  }

  void push_long(uint64_t count) {
    const auto digits = take(count);
    if (count > 8) throw Unsupported("an integer of more than 64 bits");
    int64_t value = count > 0 && static_cast<int8_t>(digits.back()) < 0 ? -1 : 0;
    for (size_t i = count; i-- > 0;) {
      value = static_cast<int64_t>(static_cast<uint64_t>(value) * 256 +
                                   static_cast<uint8_t>(digits[i]));
    }
    push_integer(value);
  }

  void step(uint8_t opcode) {
    switch (opcode) {
      case 0x80:
        take(1);
        return;  // PROTO
      case 0x95:
        take(8);
        return;  // FRAME
      case '(':
        marks_.push_back(stack_.size());
        return;
      case '0':
        pop();
        return;

      case 'N':
        push(Kind::kNone);
        return;
      case 0x88:
        return push_integer(1, Kind::kBool);
      case 0x89:
        return push_integer(0, Kind::kBool);
      case 'J':
        return push_integer(little<int32_t>());
      case 'K':
        return push_integer(little<uint8_t>());
      case 'M':
        return push_integer(little<uint16_t>());
      case 0x8a:
        return push_long(little<uint8_t>());
      case 'G': {
        push(Kind::kFloat).real = std::bit_cast<double>(__builtin_bswap64(little<uint64_t>()));
        return;
      }
      case 0x8c:
        return push_text(take(little<uint8_t>()));
      case 'X':
        return push_text(take(little<uint32_t>()));
      case 0x8d:
        return push_text(take(little<uint64_t>()));
      case 'C':
        return push_text(take(little<uint8_t>()), Kind::kBytes);
      case 'B':
        return push_text(take(little<uint32_t>()), Kind::kBytes);
      case 0x8e:
        return push_text(take(little<uint64_t>()), Kind::kBytes);

      case ')':
        return push_tuple(0);
      case 0x85:
        return push_tuple(1);
      case 0x86:
        return push_tuple(2);
      case 0x87:
        return push_tuple(3);
      case 't': {
        auto items = pop_to_mark();
        push(Kind::kTuple).items = std::move(items);
        return;
      }
      case ']':
        push(Kind::kList);
        return;
      case 'a': {
        const Ref item = pop();
        return extend(Kind::kList, {item});
      }
      case 'e':
        return extend(Kind::kList, pop_to_mark());
      case '}':
        push(Kind::kDict);
        return;
      case 's': {
        const Ref value = pop();
        const Ref key = pop();
        return extend(Kind::kDict, {key, value});
      }
      case 'u':
        return extend(Kind::kDict, pop_to_mark());

      case 'q':
        return memoize(little<uint8_t>());
      case 'r':
        return memoize(little<uint32_t>());
      case 0x94:
        return memoize(memoized_);
      case 'h':
        return recall(little<uint8_t>());
      case 'j':
        return recall(little<uint32_t>());

      case 'c': {
        const auto module = line();
        return push_global(module, line());
      }
      case 0x93: {
        const Ref name = pop();
        const Ref module = pop();
        if (nodes_[name].kind != Kind::kString || nodes_[module].kind != Kind::kString) {
          fail("a class without a name");
        }
        return push_global(nodes_[module].text, nodes_[name].text);
      }
      case 'R':
      case 0x81:
        return call();
      case 'b': {
        const Ref state = pop();
        if (stack_.size() > floor() && nodes_[stack_.back()].kind == Kind::kDict) return;
        top(Kind::kCall).items.push_back(state);
        return;
      }
      case 'Q': {
        const Ref id = pop();
        push(Kind::kPersistent).items = {id};
        return;
      }
      default:
        throw Unsupported(
            c10::str("the pickle opcode ", static_cast<int>(opcode), " (at byte ", at_ - 1, ")"));
    }
  }

  static constexpr Ref kNotThere = std::numeric_limits<Ref>::max();

  const std::string_view bytes_;
  std::vector<Node>& nodes_;
  std::deque<std::string>& names_;
  size_t at_ = 0;
  std::vector<Ref> stack_;
  std::vector<size_t> marks_;
  std::vector<Ref> memo_;
  size_t memoized_ = 0;
};

Tree::Tree(std::string_view bytes) : length_(bytes.size()) {
  constexpr size_t longest = size_t{2} * 1024 * 1024 * 1024;
  if (bytes.size() > longest) throw Unsupported("a pickle of more than 2 GiB");
  root_ = Machine(bytes, nodes_, names_).run();
}

}  // namespace fsdp2::pickle
