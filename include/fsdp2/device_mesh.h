#pragma once

// DeviceMesh: an n-dimensional array of ranks with a name for each dimension, and a process group
// along each. Follows torch.distributed.device_mesh
// (pytorch.org/docs/stable/distributed.html#devicemesh).

#include <fsdp2/process_group.h>

#include <c10/core/Device.h>

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fsdp2 {

/// A value type: copies share the mesh. Immutable and safe to read from several threads. Equality
/// compares ranks, shape, names and device type.
class DeviceMesh {
 public:
  /// A mesh dimension: its index (negative counts from the end) or its name.
  using Dim = std::variant<int64_t, std::string>;

  DeviceMesh() = default;  // "no mesh": defined() is false
  bool defined() const { return impl_ != nullptr; }

  c10::DeviceType device_type() const;
  /// The device of this rank's tensors.
  c10::Device device() const;
  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  const std::vector<std::string>& mesh_dim_names() const;  // empty when unnamed
  /// All global ranks, row-major over shape().
  const std::vector<int>& ranks() const;

  int64_t size() const;
  int64_t size(const Dim& dim) const;
  /// The group along one dimension; without an argument the mesh must be 1-D.
  ProcessGroup get_group() const;
  ProcessGroup get_group(const Dim& dim) const;
  /// This rank's index along a dimension; without an argument the mesh must be 1-D.
  int64_t get_local_rank() const;
  int64_t get_local_rank(const Dim& dim) const;
  /// Index along every dimension; nothing if this rank is not in the mesh.
  std::optional<std::vector<int64_t>> get_coordinate() const;
  /// Position of a name. Error listing the names if there is none such.
  int64_t dim_index(const Dim& dim) const;

  /// The sub-mesh of one or several named dimensions, in the mesh's order, that this rank is in.
  /// Shares the mesh's groups; no communication. Error if there is no such name, or the order is
  /// another.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  /// One dimension made of all of this mesh's. Collective over this mesh. The name (default: the
  /// names joined by '_') can then be used to slice the mesh that this one was sliced from. Error
  /// if the name is in use for something else.
  DeviceMesh flatten(const std::string& name = {}) const;

  /// A mesh over groups that exist, one a dimension; for n > 1 `ranks` (row-major) and `shape` are
  /// needed. On a rank that is not in `ranks` the groups may be null. Error if a group's ranks are
  /// not those along its dimension.
  static DeviceMesh from_group(const ProcessGroup& group, c10::DeviceType device_type,
                               const std::string& name = {});
  static DeviceMesh from_group(const std::vector<ProcessGroup>& groups, c10::DeviceType device_type,
                               const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                               const std::vector<std::string>& names = {});

  std::string to_string() const;
  bool operator==(const DeviceMesh& other) const;

  struct Impl;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// A mesh over the whole world; collective. `device` is "cpu" or "cuda", or, in a world of backend
/// "fake", "meta": then modules are sharded and stepped by sizes alone. Initialises the process
/// group if that has not been done. Dimensions that cover the world use its group. Error, on all
/// ranks, if the product of `shape` is not the world size, the names are not unique, one a
/// dimension, the world has no backend for the device, or ranks disagree.
DeviceMesh init_device_mesh(const std::string& device, const std::vector<int64_t>& shape,
                            const std::vector<std::string>& names = {});

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

}  // namespace fsdp2
