#include "comm/groups.h"
#include "comm/world.h"
#include "mesh/layout.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/collectives.h>
#include <fsdp2/device_mesh.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <ostream>

namespace fsdp2 {

using mesh::Layout;

struct DeviceMesh::Impl {
  /// What the slices of one mesh share: the mesh itself, and the dimensions that flatten() added.
  struct Root {
    struct Flat {
      std::vector<int64_t> dims;
      ProcessGroup group;
    };
    std::string key;  // the same on all ranks, and no other mesh's
    c10::DeviceType device_type;
    Layout layout;
    std::optional<std::vector<int64_t>> at;
    std::vector<ProcessGroup> groups;
    mutable std::mutex mutex;
    mutable std::map<std::string, Flat> flats;
  };

  std::shared_ptr<const Root> root;
  /// Dimensions of the root that make each of ours.
  std::vector<std::vector<int64_t>> dims;
  Layout layout;
  std::optional<std::vector<int64_t>> at;
  std::vector<ProcessGroup> groups;
};

namespace {

DeviceMesh whole(std::shared_ptr<DeviceMesh::Impl::Root> root) {
  auto impl = std::make_shared<DeviceMesh::Impl>();
  for (int64_t dim = 0; dim < root->layout.ndim(); ++dim) impl->dims.push_back({dim});
  impl->layout = root->layout;
  impl->at = root->at;
  impl->groups = root->groups;
  impl->root = std::move(root);
  return DeviceMesh(std::move(impl));
}

const DeviceMesh::Impl& checked(const std::shared_ptr<const DeviceMesh::Impl>& impl) {
  TORCH_CHECK(
      impl, "DeviceMesh: this is no mesh (default-constructed): make one with init_device_mesh()");
  return *impl;
}

const std::vector<int64_t>& own_coordinate(const DeviceMesh::Impl& impl, const char* who) {
  TORCH_CHECK(impl.at, "DeviceMesh::", who, ": rank ", get_rank(), " is not in the mesh of ranks {",
              c10::Join(", ", impl.layout.ranks), "}");
  return *impl.at;
}

void need_one_dim(const DeviceMesh::Impl& impl, const char* who) {
  TORCH_CHECK(impl.layout.ndim() == 1, "DeviceMesh::", who,
              " without a dimension needs a 1-D mesh; this one is ", mesh::shape_text(impl.layout),
              ": give a dimension");
}

c10::DeviceType device_type_of(const std::string& device) {
  if (device == "cpu") return c10::kCPU;
  if (device == "cuda") return c10::kCUDA;
  TORCH_CHECK(device == "meta", "init_device_mesh: `device` is '", device,
              "': 'cpu', 'cuda' and, for backend 'fake', 'meta' are known (a type, without an "
              "index)");
  return c10::kMeta;
}

/// The group of `ranks`, all of which call this; the world's own where it fits.
ProcessGroup group_of(const std::vector<int>& ranks, const std::string& key,
                      const std::string& name) {
  std::vector<int> world(get_world_size());
  std::iota(world.begin(), world.end(), 0);
  return ranks == world ? world_group() : comm::make_group_of_members(ranks, key, name);
}

std::string dim_name(const Layout& layout, int64_t dim) {
  return layout.names.empty() ? "dim" + std::to_string(dim) : layout.names[dim];
}

}  // namespace

c10::DeviceType DeviceMesh::device_type() const { return checked(impl_).root->device_type; }

c10::Device DeviceMesh::device() const {
  const c10::DeviceType type = device_type();
  const c10::Device own = get_device();
  return own.type() == type ? own : c10::Device(type, type == c10::kCUDA ? get_local_rank() : -1);
}

int64_t DeviceMesh::ndim() const { return checked(impl_).layout.ndim(); }
const std::vector<int64_t>& DeviceMesh::shape() const { return checked(impl_).layout.shape; }
const std::vector<std::string>& DeviceMesh::mesh_dim_names() const {
  return checked(impl_).layout.names;
}
const std::vector<int>& DeviceMesh::ranks() const { return checked(impl_).layout.ranks; }

int64_t DeviceMesh::size() const { return static_cast<int64_t>(ranks().size()); }
int64_t DeviceMesh::size(const Dim& dim) const { return shape()[dim_index(dim)]; }

ProcessGroup DeviceMesh::get_group() const {
  need_one_dim(checked(impl_), "get_group()");
  return get_group(Dim(int64_t{0}));
}

ProcessGroup DeviceMesh::get_group(const Dim& dim) const {
  const int64_t index = dim_index(dim);
  own_coordinate(*impl_, "get_group");
  return impl_->groups[index];
}

int64_t DeviceMesh::get_local_rank() const {
  need_one_dim(checked(impl_), "get_local_rank()");
  return get_local_rank(Dim(int64_t{0}));
}

int64_t DeviceMesh::get_local_rank(const Dim& dim) const {
  const int64_t index = dim_index(dim);
  return own_coordinate(*impl_, "get_local_rank")[index];
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const { return checked(impl_).at; }

int64_t DeviceMesh::dim_index(const Dim& dim) const {
  const Layout& layout = checked(impl_).layout;
  if (const auto* index = std::get_if<int64_t>(&dim)) {
    const int64_t ndim = layout.ndim();
    TORCH_CHECK(*index >= -ndim && *index < ndim, "DeviceMesh: dimension ", *index, " is outside ",
                -ndim, " to ", ndim - 1, " of the mesh ", mesh::shape_text(layout));
    return *index < 0 ? *index + ndim : *index;
  }
  const auto& name = std::get<std::string>(dim);
  const auto found = std::find(layout.names.begin(), layout.names.end(), name);
  TORCH_CHECK(found != layout.names.end(), "DeviceMesh: there is no dimension '", name, "'; ",
              layout.names.empty() ? "the mesh has no names"
                                   : "there are: " + c10::Join(", ", layout.names));
  return found - layout.names.begin();
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return (*this)[std::vector<std::string>{name}];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  const Impl& self = checked(impl_);
  const DeviceMesh::Impl::Root& root = *self.root;
  own_coordinate(self, "operator[]");
  TORCH_CHECK(!names.empty(), "DeviceMesh: a slice needs at least one name");
  auto impl = std::make_shared<Impl>();
  impl->root = self.root;
  const bool is_root = self.layout == root.layout;
  for (const std::string& name : names) {
    const auto found = std::find(self.layout.names.begin(), self.layout.names.end(), name);
    if (found != self.layout.names.end()) {
      const size_t dim = found - self.layout.names.begin();
      impl->dims.push_back(self.dims[dim]);
      impl->groups.push_back(self.groups[dim]);
      continue;
    }
    const std::lock_guard lock(root.mutex);
    const auto flat = root.flats.find(name);
    if (!is_root || flat == root.flats.end()) {
      std::vector<std::string> known = self.layout.names;
      if (is_root) {
        for (const auto& [flat_name, unused] : root.flats) known.push_back(flat_name);
      }
      TORCH_CHECK(false, "DeviceMesh: there is no dimension '", name, "'; ",
                  known.empty() ? "the mesh has no names" : "there are: " + c10::Join(", ", known));
    }
    impl->dims.push_back(flat->second.dims);
    impl->groups.push_back(flat->second.group);
  }
  int64_t last = -1;
  for (const std::vector<int64_t>& group : impl->dims) {
    TORCH_CHECK(group.front() > last, "DeviceMesh: the slice {", c10::Join(", ", names), "} of ",
                mesh::shape_text(self.layout), " overlaps or is not in the mesh's order");
    last = group.back();
  }
  impl->layout = mesh::slice(root.layout, *root.at, impl->dims, names);
  impl->at = mesh::coordinate(impl->layout, get_rank());
  return DeviceMesh(std::move(impl));
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  const Impl& self = checked(impl_);
  const DeviceMesh::Impl::Root& root = *self.root;
  TORCH_CHECK(!name.empty() || !self.layout.names.empty(),
              "DeviceMesh::flatten: give a name: the mesh has no names to join");
  own_coordinate(self, "flatten");
  const std::string flat_name = name.empty() ? c10::Join("_", self.layout.names) : name;
  std::vector<int64_t> dims;
  for (const std::vector<int64_t>& group : self.dims)
    dims.insert(dims.end(), group.begin(), group.end());
  if (self.layout.ndim() == 1 && self.layout.names == std::vector<std::string>{flat_name})
    return *this;

  auto impl = std::make_shared<Impl>();
  impl->root = self.root;
  impl->dims = {dims};
  impl->layout = mesh::slice(root.layout, *root.at, impl->dims, {flat_name});
  impl->at = mesh::coordinate(impl->layout, get_rank());
  const std::lock_guard lock(root.mutex);
  const auto named = std::find(root.layout.names.begin(), root.layout.names.end(), flat_name);
  TORCH_CHECK(named == root.layout.names.end(), "DeviceMesh::flatten: '", flat_name,
              "' is a dimension of the mesh ", mesh::shape_text(root.layout),
              " already: choose another name");
  auto flat = root.flats.find(flat_name);
  if (flat == root.flats.end()) {
    const ProcessGroup group =
        self.layout.ndim() == 1
            ? self.groups.front()
            : group_of(impl->layout.ranks,
                       c10::str(root.key, "/", flat_name, "/", impl->layout.ranks.front()),
                       flat_name);
    flat = root.flats.emplace(flat_name, DeviceMesh::Impl::Root::Flat{dims, group}).first;
  }
  TORCH_CHECK(flat->second.dims == dims, "DeviceMesh::flatten: '", flat_name,
              "' names other flattened dimensions already: choose another name");
  impl->groups = {flat->second.group};
  return DeviceMesh(std::move(impl));
}

DeviceMesh DeviceMesh::from_group(const ProcessGroup& group, c10::DeviceType device_type,
                                  const std::string& name) {
  TORCH_CHECK(group, "DeviceMesh::from_group: `group` is null (this rank is not a member of it)");
  const std::vector<std::string> names =
      name.empty() ? std::vector<std::string>() : std::vector{name};
  return from_group({group}, device_type, comm::global_ranks(group), {group->getSize()}, names);
}

DeviceMesh DeviceMesh::from_group(const std::vector<ProcessGroup>& groups,
                                  c10::DeviceType device_type, const std::vector<int>& ranks,
                                  const std::vector<int64_t>& shape,
                                  const std::vector<std::string>& names) {
  auto root = std::make_shared<DeviceMesh::Impl::Root>();
  root->device_type = device_type;
  root->layout = {ranks, shape, names};
  mesh::check(root->layout, "DeviceMesh::from_group");
  TORCH_CHECK(groups.size() == shape.size(), "DeviceMesh::from_group: `groups` has ", groups.size(),
              " groups for ", shape.size(), " dimensions");
  root->at = mesh::coordinate(root->layout, get_rank());
  if (root->at) {
    for (int64_t dim = 0; dim < root->layout.ndim(); ++dim) {
      const std::string what =
          "DeviceMesh::from_group: the group of " + dim_name(root->layout, dim);
      TORCH_CHECK(groups[dim], what, " is null on rank ", get_rank(), ", which is in the mesh");
      const std::vector<int> along = mesh::slice(root->layout, *root->at, {{dim}}, {}).ranks;
      const std::vector<int> members = comm::global_ranks(groups[dim]);
      TORCH_CHECK(along == members, what, " has ranks {", c10::Join(", ", members),
                  "} but the mesh has {", c10::Join(", ", along), "} along it");
    }
    root->groups = groups;
    root->key = "mesh/" + groups.front()->getGroupName() + "/" + c10::Join("_", ranks);
  }
  return whole(std::move(root));
}

DeviceMesh init_device_mesh(const std::string& device, const std::vector<int64_t>& shape,
                            const std::vector<std::string>& names) {
  auto root = std::make_shared<DeviceMesh::Impl::Root>();
  root->device_type = device_type_of(device);
  if (!is_initialized()) init_process_group();
  comm::World& world = comm::world();
  root->layout = {{}, shape, names};
  for (int rank = 0; rank < world.size; ++rank) root->layout.ranks.push_back(rank);
  mesh::check(root->layout, "init_device_mesh");
  TORCH_CHECK(world.backends.contains(root->device_type), "init_device_mesh: `device` is '", device,
              "' but the process group has no backend for it (init_process_group's `backend`)");
  const std::string text = mesh::shape_text(root->layout) + " on " + device;
  const std::vector<std::string> texts = all_gather_bytes(text, world.group);
  for (int rank = 0; rank < world.size; ++rank) {
    TORCH_CHECK(texts[rank] == texts[0], "init_device_mesh: rank ", rank, " asks for ", texts[rank],
                " but rank 0 for ", texts[0], ": all ranks must make the same mesh");
  }

  root->key = "mesh/" + std::to_string(world.groups_made++);
  root->at = mesh::coordinate(root->layout, world.rank);
  for (int64_t dim = 0; dim < root->layout.ndim(); ++dim) {
    const Layout along = mesh::slice(root->layout, *root->at, {{dim}}, {});
    root->groups.push_back(group_of(along.ranks,
                                    c10::str(root->key, "/", dim, "/", along.ranks.front()),
                                    dim_name(root->layout, dim)));
  }
  return whole(std::move(root));
}

std::string DeviceMesh::to_string() const {
  if (!impl_) return "DeviceMesh()";
  return c10::str("DeviceMesh(", mesh::shape_text(impl_->layout), ", '",
                  c10::DeviceTypeName(device_type(), true), "', ranks={", c10::Join(", ", ranks()),
                  "})");
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (impl_ == other.impl_) return true;
  if (!impl_ || !other.impl_) return false;
  return impl_->layout == other.impl_->layout && device_type() == other.device_type();
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  return out << mesh.to_string();
}

DeviceMesh default_mesh() {
  static std::mutex mutex;
  static auto* made = new std::pair<ProcessGroup, DeviceMesh>();
  const std::lock_guard lock(mutex);
  if (!is_initialized()) init_process_group();
  if (made->first != world_group()) {
    *made = {world_group(),
             init_device_mesh(c10::DeviceTypeName(get_device().type(), true), {get_world_size()})};
  }
  return made->second;
}

DeviceMesh neighbours(const DeviceMesh& mesh, int64_t size) {
  return DeviceMesh::from_group(comm::neighbour_group(mesh.get_group(mesh.ndim() - 1), size),
                                mesh.device_type());
}

void broadcast_from_first(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          const std::vector<int64_t>& dims, const std::string& what) {
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim)
    wait(broadcast(tensor, 0, mesh.get_group(*dim)), what);
}

void broadcast_from_first(const torch::Tensor& tensor, const DeviceMesh& mesh,
                          const std::string& what) {
  std::vector<int64_t> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  broadcast_from_first(tensor, mesh, dims, what);
}

ProcessGroup reduce_group_of(const DeviceMesh& mesh, const DeviceMesh::Dim& dim) {
  return comm::second_group(mesh.get_group(dim));
}

}  // namespace fsdp2
