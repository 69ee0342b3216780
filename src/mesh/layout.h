#pragma once

// The arithmetic of an n-dimensional array of ranks: no communication, no groups.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::mesh {

struct Layout {
  std::vector<int> ranks;  // row-major
  std::vector<int64_t> shape;
  std::vector<std::string> names;  // empty, or one a dimension

  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  bool operator==(const Layout&) const = default;
};

/// Error, starting with `who`, if shape, ranks and names do not fit.
void check(const Layout& layout, const std::string& who);

/// Where `rank` is; nothing if it is not there.
std::optional<std::vector<int64_t>> coordinate(const Layout& layout, int rank);

/// The part that runs along `dims` through `at`. Each entry of `dims` becomes one dimension of the
/// result, made of one or several dimensions of `layout`, and takes its name from `names`.
Layout slice(const Layout& layout, const std::vector<int64_t>& at,
             const std::vector<std::vector<int64_t>>& dims, const std::vector<std::string>& names);

/// "(dp=2, tp=4)" or "(2, 4)".
std::string shape_text(const Layout& layout);

}  // namespace fsdp2::mesh
