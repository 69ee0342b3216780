#include "checkpoint/pickle_writer.h"

#include <c10/util/Exception.h>

#include <bit>
#include <limits>

namespace fsdp2::pickle {

Writer::Writer() : out_("\x80\x02") {}

bool Writer::recalled(const std::string& what) {
  const auto place = memo_.find(what);
  if (place == memo_.end()) return false;
  if (place->second < 256) {
    put("h");
    raw(static_cast<uint8_t>(place->second));
  } else {
    put("j");
    raw(place->second);
  }
  return true;
}
void Writer::memoize(const std::string& what) {
  const auto index = static_cast<uint32_t>(memo_.size());
  memo_.emplace(what, index);
  if (index < 256) {
    put("q");
    raw(static_cast<uint8_t>(index));
  } else {
    put("r");
    raw(index);
  }
}

Writer& Writer::none() { return put("N"); }
Writer& Writer::boolean(bool value) { return put(value ? "\x88" : "\x89"); }
Writer& Writer::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    put("K");
    raw(static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() &&
             value <= std::numeric_limits<int32_t>::max()) {
    put("J");
    raw(static_cast<int32_t>(value));
  } else {
    put("\x8a\x08");
    raw(value);
  }
  return *this;
}
Writer& Writer::real(double value) {
  put("G");
  raw(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
  return *this;
}
Writer& Writer::string(std::string_view value) {
  TORCH_CHECK_VALUE(value.size() <= std::numeric_limits<uint32_t>::max(),
                    "a string of more than 4 GiB cannot be saved");
  // Long ones again each time: a reader is right not to believe in much text that a few bytes mean.
  constexpr size_t longest_known = 1000;
  const std::string key = value.size() <= longest_known ? "s" + std::string(value) : "";
  if (!key.empty() && recalled(key)) return *this;
  put("X");
  raw(static_cast<uint32_t>(value.size()));
  put(value);
  if (!key.empty()) memoize(key);
  return *this;
}
Writer& Writer::bytes(std::string_view value) {
  TORCH_CHECK_VALUE(value.size() <= std::numeric_limits<uint32_t>::max(),
                    "bytes of more than 4 GiB cannot be saved");
  put("B");
  raw(static_cast<uint32_t>(value.size()));
  return put(value);
}
Writer& Writer::global(std::string_view module, std::string_view name) {
  std::string text = "c";
  text.append(module).append("\n").append(name).append("\n");
  if (recalled(text)) return *this;
  put(text);
  memoize(text);
  return *this;
}

Writer& Writer::mark() { return put("("); }
Writer& Writer::tuple() { return put("t"); }
Writer& Writer::appends() { return put("e"); }
Writer& Writer::set_items() { return put("u"); }
Writer& Writer::empty_tuple() { return put(")"); }
Writer& Writer::empty_list() { return put("]"); }
Writer& Writer::empty_dict() { return put("}"); }
Writer& Writer::tuple_of(const std::vector<int64_t>& values) {
  mark();
  for (const int64_t value : values) integer(value);
  return tuple();
}

Writer& Writer::reduce() { return put("R"); }
Writer& Writer::new_object() { return put("\x81"); }
Writer& Writer::build() { return put("b"); }
Writer& Writer::persistent_id() { return put("Q"); }

std::string Writer::finish() {
  put(".");
  return std::move(out_);
}

}  // namespace fsdp2::pickle
