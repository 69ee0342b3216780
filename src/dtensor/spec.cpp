#include "dtensor/spec.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <numeric>

namespace fsdp2::dtensor {
namespace {

bool same_groups(const DeviceMesh& a, const DeviceMesh& b) {
  for (int64_t dim = 0; dim < a.ndim(); ++dim) {
    if (a.get_group(dim) != b.get_group(dim)) return false;
  }
  return true;
}

std::mutex mutex;
std::vector<std::weak_ptr<const Spec>>& known() {
  static auto* specs = new std::vector<std::weak_ptr<const Spec>>;
  return *specs;
}

}  // namespace

SpecPtr make_spec(const DeviceMesh& mesh, const Placements& placements) {
  TORCH_CHECK_VALUE(mesh.defined(), "a DTensor needs a mesh: the DeviceMesh is empty");
  TORCH_CHECK_VALUE(static_cast<int64_t>(placements.size()) == mesh.ndim(), "placements ",
                    to_string(placements), " for a mesh of ", mesh.ndim(),
                    " dimensions: give one placement a mesh dimension");
  std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(known(), [](const auto& spec) { return spec.expired(); });
  for (const auto& entry : known()) {
    // Meshes may be equal and yet talk through other groups (a world that was made anew).
    SpecPtr spec = entry.lock();
    if (spec && spec->placements == placements && spec->mesh == mesh &&
        same_groups(spec->mesh, mesh)) {
      return spec;
    }
  }
  auto spec = std::make_shared<Spec>();
  const auto coordinate = mesh.get_coordinate();
  TORCH_CHECK_VALUE(coordinate, "rank ", get_rank(), " is not in ", mesh.to_string(),
                    ": only ranks of a mesh can make a DTensor on it");
  spec->mesh = mesh;
  spec->placements = placements;
  spec->coordinate = *coordinate;
  spec->replicated = true;
  for (const Placement& placement : placements) {
    spec->partial = spec->partial || placement.is_partial();
    spec->replicated = spec->replicated && placement.is_replicate();
  }
  known().push_back(spec);
  return spec;
}

bool same(const SpecPtr& a, const SpecPtr& b) {
  return a == b || (a->placements == b->placements && a->mesh == b->mesh);
}

SpecPtr with_placements(const Spec& spec, Placements placements) {
  return make_spec(spec.mesh, placements);
}

SpecPtr without_partial(const SpecPtr& spec) {
  if (!spec->partial) return spec;
  Placements placements = spec->placements;
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return with_placements(*spec, std::move(placements));
}

SpecPtr all_replicate(const Spec& spec) {
  return with_placements(spec, Placements(spec.placements.size(), Replicate()));
}

bool shards(const Spec& spec, int64_t dim) {
  return std::any_of(spec.placements.begin(), spec.placements.end(),
                     [&](const Placement& placement) { return placement.is_shard(dim); });
}

Placements normalized(Placements placements, int64_t ndim, const char* what) {
  for (Placement& placement : placements) {
    if (!placement.is_shard()) continue;
    const int64_t dim = placement.dim();
    TORCH_CHECK_INDEX(dim >= -ndim && dim < ndim, what, ": ", placement.to_string(),
                      " does not exist in a tensor of ", ndim, " dimensions");
    if (dim < 0) placement = Shard(dim + ndim);
  }
  return placements;
}

Chunk part_along(const Spec& spec, c10::ArrayRef<int64_t> coordinate, int64_t dim, int64_t extent,
                 int64_t mesh_dim) {
  if (mesh_dim < 0) mesh_dim = static_cast<int64_t>(spec.placements.size());
  Chunk part{0, extent};
  for (int64_t i = 0; i < mesh_dim; ++i) {
    if (!spec.placements[i].is_shard(dim)) continue;
    const Chunk chunk = chunk_of(part.length, spec.mesh.size(i), coordinate[i]);
    part = {part.offset + chunk.offset, chunk.length};
  }
  return part;
}

Sizes local_sizes(const Spec& spec, c10::IntArrayRef sizes) {
  Sizes local(sizes.begin(), sizes.end());
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    if (!spec.placements[i].is_shard()) continue;
    int64_t& extent = local[spec.placements[i].dim()];
    extent = chunk_of(extent, spec.mesh.size(static_cast<int64_t>(i)), spec.coordinate[i]).length;
  }
  return local;
}

at::Tensor part_of(const at::Tensor& whole, const Spec& spec) {
  at::Tensor part = whole;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    if (!spec.placements[i].is_shard()) continue;
    const int64_t dim = spec.placements[i].dim();
    const Chunk chunk =
        chunk_of(part.size(dim), spec.mesh.size(static_cast<int64_t>(i)), spec.coordinate[i]);
    part = part.narrow(dim, chunk.offset, chunk.length);
  }
  return part;
}

Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> order(ndim);
  Sizes strides(ndim, 0);
  std::iota(order.begin(), order.end(), 0);
  if (!like.is_contiguous()) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  }
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (like.stride(*dim) == 0 && like.size(*dim) > 1) {
      strides[*dim] = 0;
      continue;
    }
    strides[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

}  // namespace fsdp2::dtensor
