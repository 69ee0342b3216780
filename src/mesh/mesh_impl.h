#pragma once

// What the rest of the library may do with a mesh that a user need not.

#include <fsdp2/device_mesh.h>

#include <torch/types.h>

#include <string>
#include <vector>

namespace fsdp2 {

/// All ranks of the world as one dimension, on get_device()'s type; one mesh as long as the world
/// lasts. Initialises the process group from the environment if need be. The first call is
/// collective.
DeviceMesh default_mesh();

/// A second group of the ranks along `dim`, reserved for reductions, so that they never queue
/// behind all-gathers in get_group(dim). The first call for a group is collective over that group;
/// a group of one rank is its own second.
ProcessGroup reduce_group_of(const DeviceMesh& mesh, const DeviceMesh::Dim& dim);

/// 1-D: this rank and its neighbours along the last dimension, `size` of them, a factor of that
/// dimension's. The first call for a mesh and a size is collective over the dimension.
DeviceMesh neighbours(const DeviceMesh& mesh, int64_t size);

/// Makes `tensor` what the first rank along each of `dims` has. Contiguous, any dtype; collective
/// over these dimensions. `what` is what errors call it.
void broadcast_from_first(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          const std::vector<int64_t>& dims, const std::string& what);
/// Along all of the mesh's dimensions.
void broadcast_from_first(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          const std::string& what);

}  // namespace fsdp2
