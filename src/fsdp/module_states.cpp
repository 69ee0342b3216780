#include "dtensor/dtensor_impl.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>
#include <fsdp2/module_states.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>

namespace fsdp2 {
namespace {

struct NamedState {
  std::string name;
  torch::Tensor tensor;
};

std::vector<NamedState> states_of(const torch::nn::Module& module) {
  std::vector<NamedState> states;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) states.push_back({"parameter '" + item.key() + "'", item.value()});
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) states.push_back({"buffer '" + item.key() + "'", item.value()});
  }
  return states;
}

/// What every rank of the mesh says, row-major.
std::vector<std::string> gather_texts(const std::string& text, const DeviceMesh& mesh) {
  std::vector<std::string> all = {text};
  for (int64_t dim = mesh.ndim() - 1; dim >= 0; --dim) {
    std::string packed;
    for (const std::string& each : all) {
      const uint64_t size = each.size();
      packed.append(reinterpret_cast<const char*>(&size), sizeof size).append(each);
    }
    all.clear();
    for (const std::string& from : all_gather_bytes(packed, mesh.get_group(dim))) {
      for (size_t at = 0; at < from.size();) {
        uint64_t size = 0;
        std::memcpy(&size, from.data() + at, sizeof size);
        all.push_back(from.substr(at + sizeof size, size));
        at += sizeof size + size;
      }
    }
  }
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

void check_same_states(const std::vector<NamedState>& states, const DeviceMesh& mesh) {
  std::string text;
  for (const NamedState& state : states) {
    text += c10::str(state.name, " of size ", state.tensor.sizes(), ", ",
                     state.tensor.scalar_type(), is_dtensor(state.tensor) ? ", sharded\n" : "\n");
  }
  const std::vector<std::string> all = gather_texts(text, mesh);
  const std::vector<std::string> first = lines_of(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    size_t line = 0;
    while (line < first.size() && line < other.size() && first[line] == other[line]) ++line;
    const auto at = [line](const std::vector<std::string>& lines) {
      return line < lines.size() ? lines[line] : std::string("nothing more");
    };
    TORCH_CHECK(false, "the modules of rank ", mesh.ranks()[0], " and rank ", mesh.ranks()[rank],
                " differ: ", at(first), " on the one, ", at(other),
                " on the other. All ranks must build the same model.");
  }
}

/// Dimensions of its mesh along which a tensor should be the same.
std::vector<int64_t> replicated_dims(const torch::Tensor& tensor, const DeviceMesh& mesh) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (!is_dtensor(tensor) || DTensor(tensor).placements()[dim].is_replicate())
      dims.push_back(dim);
  }
  return dims;
}

uint64_t hash_of(const torch::Tensor& tensor) {
  const torch::Tensor local = is_dtensor(tensor) ? local_part(tensor) : tensor;
  if (local.is_meta()) return 0;
  const torch::Tensor bytes = local.detach().cpu().contiguous().resolve_conj().resolve_neg();
  return std::hash<std::string_view>()(
      {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

std::string dim_text(const DeviceMesh& mesh, int64_t dim) {
  return mesh.mesh_dim_names().empty() ? std::to_string(dim)
                                       : "'" + mesh.mesh_dim_names()[dim] + "'";
}

/// A line for each mesh dimension along which hashes differ. `hashes`: of all ranks, row-major.
std::string differences(const NamedState& state, const DeviceMesh& mesh,
                        const std::vector<uint64_t>& hashes) {
  std::string lines;
  for (int64_t dim : replicated_dims(state.tensor, mesh)) {
    int64_t stride = 1;
    for (int64_t inner = dim + 1; inner < mesh.ndim(); ++inner) stride *= mesh.size(inner);
    for (size_t rank = 0; rank < hashes.size(); ++rank) {
      const int64_t index = static_cast<int64_t>(rank) / stride % mesh.size(dim);
      const size_t origin = rank - static_cast<size_t>(index * stride);
      if (hashes[rank] == hashes[origin]) continue;
      lines += c10::str("\n  ", state.name, " differs along mesh dimension ", dim_text(mesh, dim),
                        ": rank ", mesh.ranks()[rank], " has other values than rank ",
                        mesh.ranks()[origin]);
      break;
    }
  }
  return lines;
}

/// Plain tensors are compared over `mesh`, DTensors over their own.
const DeviceMesh& mesh_of(const NamedState& state, const DeviceMesh& mesh) {
  return is_dtensor(state.tensor) ? DTensor(state.tensor).device_mesh() : mesh;
}

}  // namespace

void sync_module_states(torch::nn::Module& module, const DeviceMesh& mesh) {
  at::NoGradGuard no_grad;
  const std::vector<NamedState> states = states_of(module);
  check_same_states(states, mesh);
  for (const NamedState& state : states) {
    const DeviceMesh& over = mesh_of(state, mesh);
    const torch::Tensor local = is_dtensor(state.tensor) ? local_part(state.tensor) : state.tensor;
    if (const auto observer = write_observer(state.tensor)) observer->before_write();
    const torch::Tensor sent = local.contiguous();
    broadcast_from_first(sent, over, replicated_dims(state.tensor, over),
                         "the broadcast of " + state.name);
    if (!sent.is_same(local)) local.copy_(sent);
  }
}

void check_module_states(const torch::nn::Module& module, const DeviceMesh& mesh) {
  at::NoGradGuard no_grad;
  const std::vector<NamedState> states = states_of(module);
  check_same_states(states, mesh);
  std::vector<DeviceMesh> meshes = {mesh};
  for (const NamedState& state : states) {
    const DeviceMesh& over = mesh_of(state, mesh);
    if (std::find(meshes.begin(), meshes.end(), over) == meshes.end()) meshes.push_back(over);
  }
  std::string report;
  for (const DeviceMesh& over : meshes) {
    std::vector<NamedState> here;
    std::string text;
    for (const NamedState& state : states) {
      if (!(mesh_of(state, mesh) == over)) continue;
      here.push_back(state);
      const uint64_t hash = hash_of(state.tensor);
      text.append(reinterpret_cast<const char*>(&hash), sizeof hash);
    }
    const std::vector<std::string> all = gather_texts(text, over);
    for (size_t i = 0; i < here.size(); ++i) {
      std::vector<uint64_t> hashes(all.size());
      for (size_t rank = 0; rank < all.size(); ++rank)
        std::memcpy(&hashes[rank], all[rank].data() + i * sizeof(uint64_t), sizeof(uint64_t));
      report += differences(here[i], over, hashes);
    }
  }
  TORCH_CHECK(report.empty(), "ranks have different models:", report,
              "\nGive all ranks one seed, or call fsdp2::sync_module_states before fully_shard.");
}

}  // namespace fsdp2
