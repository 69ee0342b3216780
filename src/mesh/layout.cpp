#include "mesh/layout.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace fsdp2::mesh {
namespace {

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  return strides;
}

}  // namespace

void check(const Layout& layout, const std::string& who) {
  TORCH_CHECK(!layout.shape.empty(), who, ": `shape` is empty");
  int64_t size = 1;
  for (int64_t extent : layout.shape) {
    TORCH_CHECK(extent > 0, who, ": `shape` is ", shape_text({{}, layout.shape, {}}),
                ": all sizes must be positive");
    size *= extent;
  }
  TORCH_CHECK(size == static_cast<int64_t>(layout.ranks.size()), who, ": `shape` ",
              shape_text({{}, layout.shape, {}}), " has room for ", size, " ranks but there are ",
              layout.ranks.size());
  TORCH_CHECK(layout.names.empty() || layout.names.size() == layout.shape.size(), who,
              ": `names` has ", layout.names.size(), " entries (", c10::Join(", ", layout.names),
              ") for ", layout.shape.size(), " dimensions");
  for (size_t i = 0; i < layout.names.size(); ++i) {
    TORCH_CHECK(!layout.names[i].empty(), who, ": `names` has an empty name at ", i);
    TORCH_CHECK(std::count(layout.names.begin(), layout.names.end(), layout.names[i]) == 1, who,
                ": `names` has '", layout.names[i], "' twice");
  }
  std::vector<int> sorted = layout.ranks;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  TORCH_CHECK(twice == sorted.end(), who, ": `ranks` has ", *twice, " twice");
}

std::optional<std::vector<int64_t>> coordinate(const Layout& layout, int rank) {
  const auto found = std::find(layout.ranks.begin(), layout.ranks.end(), rank);
  if (found == layout.ranks.end()) return std::nullopt;
  int64_t rest = found - layout.ranks.begin();
  std::vector<int64_t> at;
  for (int64_t stride : strides_of(layout.shape)) {
    at.push_back(rest / stride);
    rest %= stride;
  }
  return at;
}

Layout slice(const Layout& layout, const std::vector<int64_t>& at,
             const std::vector<std::vector<int64_t>>& dims, const std::vector<std::string>& names) {
  const std::vector<int64_t> strides = strides_of(layout.shape);
  int64_t origin = 0;
  for (size_t dim = 0; dim < at.size(); ++dim) origin += at[dim] * strides[dim];
  Layout result;
  result.names = names;
  std::vector<int64_t> offsets = {0};
  for (const std::vector<int64_t>& group : dims) {
    int64_t extent = 1;
    for (int64_t dim : group) {
      origin -= at[dim] * strides[dim];
      extent *= layout.shape[dim];
      std::vector<int64_t> longer;
      for (int64_t offset : offsets) {
        for (int64_t i = 0; i < layout.shape[dim]; ++i) longer.push_back(offset + i * strides[dim]);
      }
      offsets = std::move(longer);
    }
    result.shape.push_back(extent);
  }
  for (int64_t offset : offsets) result.ranks.push_back(layout.ranks[origin + offset]);
  return result;
}

std::string shape_text(const Layout& layout) {
  std::vector<std::string> parts;
  for (size_t dim = 0; dim < layout.shape.size(); ++dim) {
    const std::string size = std::to_string(layout.shape[dim]);
    parts.push_back(layout.names.empty() ? size : layout.names[dim] + "=" + size);
  }
  return "(" + c10::Join(", ", parts) + ")";
}

}  // namespace fsdp2::mesh
