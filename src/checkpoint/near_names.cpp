#include "checkpoint/near_names.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <unordered_set>

namespace fsdp2::dcp {
namespace {

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

bool is_tail(const std::string& name, const std::string& tail) {
  return name.size() > tail.size() && name.ends_with(tail) &&
         name[name.size() - tail.size() - 1] == '.';
}

}  // namespace

std::string near_names(const std::string& name, const std::vector<std::string>& names) {
  constexpr size_t most = 3, longest = 200, searched = 20'000;
  if (name.size() > longest) return "";
  std::vector<std::pair<size_t, const std::string*>> near;
  std::unordered_set<std::string_view> seen;
  for (size_t i = 0; i < std::min(names.size(), searched); ++i) {
    const std::string& other = names[i];
    if (!seen.insert(other).second) continue;
    // A prefix too much or too little is the usual mistake.
    if (is_tail(name, other) || is_tail(other, name)) {
      near.emplace_back(0, &other);
    } else if (other.size() <= longest) {
      const size_t distance = edit_distance(name, other);
      if (distance <= std::max<size_t>(1, name.size() / 4)) near.emplace_back(distance, &other);
    }
  }
  if (near.empty()) return "";
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text = "; did you mean ";
  for (size_t i = 0; i < std::min(near.size(), most); ++i) {
    if (i > 0) text += " or ";
    text += *near[i].second;
  }
  return text + "?";
}

std::string short_list(const std::vector<std::string>& names) {
  constexpr size_t most = 10;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), most); ++i) {
    text += (i > 0 ? ", " : "") + names[i];
  }
  return names.size() > most ? c10::str(text, " and ", names.size() - most, " more") : text;
}

}  // namespace fsdp2::dcp
