#include "checkpoint/s3_text.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>

namespace fsdp2::files::s3 {
namespace {

void append_utf8(std::string& text, uint32_t code) {
  const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
  const auto tail = [&](uint32_t shift) { put(0x80U | ((code >> shift) & 0x3fU)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0U | (code >> 6U));
    tail(0);
  } else if (code < 0x10000) {
    put(0xe0U | (code >> 12U));
    tail(6), tail(0);
  } else {
    put(0xf0U | ((code >> 18U) & 0x7U));
    tail(12), tail(6), tail(0);
  }
}

/// `name` is what stands between & and ;.
void append_entity(std::string& text, const std::string& name) {
  if (name == "amp") text += '&';
  if (name == "lt") text += '<';
  if (name == "gt") text += '>';
  if (name == "quot") text += '"';
  if (name == "apos") text += '\'';
  if (!name.starts_with('#')) return;
  const bool hex = name.size() > 1 && name[1] == 'x';
  append_utf8(text, static_cast<uint32_t>(
                        std::strtoul(name.c_str() + (hex ? 2 : 1), nullptr, hex ? 16 : 10)));
}

std::string without_entities(std::string_view xml) {
  std::string text;
  while (!xml.empty()) {
    const size_t start = xml.find('&');
    text += xml.substr(0, start);
    if (start == std::string_view::npos) break;
    const size_t end = xml.find(';', start);
    if (end == std::string_view::npos) break;
    append_entity(text, std::string(xml.substr(start + 1, end - start - 1)));
    xml.remove_prefix(end + 1);
  }
  return text;
}

}  // namespace

std::vector<std::string_view> elements(std::string_view xml, const std::string& name) {
  const std::string open = "<" + name + ">", close = "</" + name + ">";
  std::vector<std::string_view> found;
  for (size_t start = xml.find(open); start != std::string_view::npos;
       start = xml.find(open, start)) {
    start += open.size();
    const size_t end = xml.find(close, start);
    if (end == std::string_view::npos) break;
    found.push_back(xml.substr(start, end - start));
    start = end + close.size();
  }
  return found;
}

std::string text_of(std::string_view xml, const std::string& name) {
  const auto found = elements(xml, name);
  return found.empty() ? std::string() : without_entities(found[0]);
}

std::string percent_encoded(std::string_view text, bool keep_slashes) {
  constexpr const char* digits = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte < 0x80 && (std::isalnum(byte) != 0 ||
                                       std::string_view("-._~").find(c) != std::string_view::npos);
    if (plain || (c == '/' && keep_slashes)) {
      encoded += c;
    } else {
      encoded += '%';
      encoded += digits[byte / 16];
      encoded += digits[byte % 16];
    }
  }
  return encoded;
}

Location location_of(const std::string& path) {
  constexpr std::string_view scheme = "s3://";
  TORCH_CHECK_VALUE(path.starts_with(scheme), path, " is not s3://BUCKET/PREFIX");
  const size_t slash = std::min(path.find('/', scheme.size()), path.size());
  Location location{path.substr(scheme.size(), slash - scheme.size()),
                    slash < path.size() ? path.substr(slash + 1) : std::string()};
  while (location.key.ends_with('/')) location.key.pop_back();
  // It becomes a part of a host's name.
  const auto plain = [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 || c == '-' || c == '.' || c == '_');
  };
  TORCH_CHECK_VALUE(!location.bucket.empty() &&
                        std::all_of(location.bucket.begin(), location.bucket.end(), plain),
                    path, " is not s3://BUCKET/PREFIX: no bucket is called '", location.bucket,
                    "'");
  return location;
}

}  // namespace fsdp2::files::s3
