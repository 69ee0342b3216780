#pragma once

// A layout, worked out once: a mesh, one placement for each of its dimensions, and where this rank
// is in it.

#include <fsdp2/device_mesh.h>
#include <fsdp2/placement.h>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/types.h>

#include <memory>
#include <vector>

namespace fsdp2::dtensor {

using Sizes = c10::SmallVector<int64_t, 6>;

struct Spec {
  DeviceMesh mesh;
  Placements placements;
  std::vector<int64_t> coordinate;
  bool partial = false;     // some placement is Partial
  bool replicated = false;  // every placement is Replicate
};
using SpecPtr = std::shared_ptr<const Spec>;

/// Layouts alike share one Spec, so that most comparisons end at the pointer. Error if this rank is
/// not in the mesh or the number of placements is not the mesh's. `placements` have non-negative
/// dims.
SpecPtr make_spec(const DeviceMesh& mesh, const Placements& placements);
bool same(const SpecPtr& a, const SpecPtr& b);
/// The same mesh with other placements.
SpecPtr with_placements(const Spec& spec, Placements placements);
/// Every Partial turned into Replicate.
SpecPtr without_partial(const SpecPtr& spec);
SpecPtr all_replicate(const Spec& spec);
/// Shard dims mapped by `map(dim)`; for ops that move, add or drop tensor dimensions.
template <class Map>
SpecPtr map_shards(const SpecPtr& spec, Map&& map) {
  Placements placements = spec->placements;
  for (Placement& placement : placements) {
    if (placement.is_shard()) placement = Shard(map(placement.dim()));
  }
  return with_placements(*spec, std::move(placements));
}

bool shards(const Spec& spec, int64_t dim);

/// Negative dims wrapped. Error naming `what` if a dim is outside a tensor of `ndim` dimensions.
Placements normalized(Placements placements, int64_t ndim, const char* what);

/// What rank `coordinate` holds of `extent` elements along tensor dimension `dim`, seen before mesh
/// dimension `mesh_dim` splits it further (default: after all). Several Shards of one dim split in
/// mesh order.
Chunk part_along(const Spec& spec, c10::ArrayRef<int64_t> coordinate, int64_t dim, int64_t extent,
                 int64_t mesh_dim = -1);
Sizes local_sizes(const Spec& spec, c10::IntArrayRef sizes);
/// This rank's part of a whole tensor: a view of it.
at::Tensor part_of(const at::Tensor& whole, const Spec& spec);

/// Strides for `sizes` in the memory order of `like`, dense but for dimensions that `like` expands.
Sizes strides_like(c10::IntArrayRef sizes, const at::Tensor& like);

}  // namespace fsdp2::dtensor
