#include "dtensor/global_size.h"

#include <fsdp2/collectives.h>

#include <c10/util/Exception.h>

#include <cstring>
#include <string>

namespace fsdp2::dtensor {
namespace {

/// Of all ranks of the mesh, in its order: the number of dimensions is first.
std::vector<std::vector<int64_t>> all_sizes(const at::Tensor& local, const Spec& spec) {
  std::vector<int64_t> own = local.sizes().vec();
  own.insert(own.begin(), local.dim());
  std::string bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(int64_t));
  for (int64_t dim = spec.mesh.ndim() - 1; dim >= 0; --dim) {
    if (spec.mesh.size(dim) == 1) continue;
    std::string joined;
    for (const std::string& each : all_gather_bytes(bytes, spec.mesh.get_group(dim)))
      joined += each;
    bytes = std::move(joined);
  }
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  std::vector<std::vector<int64_t>> sizes;
  for (auto next = numbers.begin(); next != numbers.end();) {
    const auto end = next + 1 + *next;
    sizes.emplace_back(next + 1, end);
    next = end;
  }
  return sizes;
}

std::vector<int64_t> coordinate_of(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    coordinate[i] = index % shape[i];
    index /= shape[i];
  }
  return coordinate;
}

std::vector<int64_t> expected_size(const Spec& spec, c10::IntArrayRef size,
                                   const std::vector<int64_t>& coordinate) {
  std::vector<int64_t> expected = size.vec();
  for (size_t dim = 0; dim < expected.size(); ++dim) {
    expected[dim] = part_along(spec, coordinate, static_cast<int64_t>(dim), expected[dim]).length;
  }
  return expected;
}

}  // namespace

void check_local_size(const at::Tensor& local, const Spec& spec, c10::IntArrayRef size) {
  const bool dims = static_cast<int64_t>(size.size()) == local.dim();
  const auto expected = dims ? expected_size(spec, size, spec.coordinate) : size.vec();
  TORCH_CHECK_VALUE(dims && local.sizes() == c10::IntArrayRef(expected),
                    "DTensor::from_local on rank ", get_rank(), ": the local tensor has size ",
                    local.sizes(), " but a tensor of size ", size, " laid out as ",
                    to_string(spec.placements), " gives this rank ", c10::IntArrayRef(expected));
}

std::vector<int64_t> gather_global_size(const at::Tensor& local, const Spec& spec) {
  const auto sizes = all_sizes(local, spec);
  const std::vector<int64_t>& shape = spec.mesh.shape();
  std::vector<int64_t> total = sizes[0];
  // Added up along the ranks that differ from the first in coordinates of Shards only.
  for (size_t dim = 0; dim < total.size(); ++dim) {
    total[dim] = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto coordinate = coordinate_of(static_cast<int64_t>(i), shape);
      bool counts = dim < sizes[i].size();
      for (size_t j = 0; j < shape.size(); ++j) {
        counts = counts &&
                 (coordinate[j] == 0 || spec.placements[j].is_shard(static_cast<int64_t>(dim)));
      }
      if (counts) total[dim] += sizes[i][dim];
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto expected = expected_size(spec, total, coordinate_of(static_cast<int64_t>(i), shape));
    TORCH_CHECK_VALUE(sizes[i] == expected, "DTensor::from_local: the parts add up to ",
                      c10::IntArrayRef(total), ", of which rank ", spec.mesh.ranks()[i], " under ",
                      to_string(spec.placements), " should have ", c10::IntArrayRef(expected),
                      " but gave ", c10::IntArrayRef(sizes[i]),
                      " (the chunk rule: ceil(size / ranks) each, less or nothing at the end)");
  }
  return total;
}

}  // namespace fsdp2::dtensor
