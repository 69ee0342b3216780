#include "dtensor/redistribute.h"

#include "dtensor/tensor_impl.h"

#include <fsdp2/collectives.h>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

namespace fsdp2::dtensor {
namespace {

/// `length` rows of `tensor` and then zeros, contiguous.
at::Tensor padded(const at::Tensor& tensor, int64_t rows) {
  if (tensor.size(0) == rows) return tensor.contiguous();
  Sizes sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[0] = rows;
  at::Tensor out = tensor.new_zeros(sizes);
  out.narrow(0, 0, tensor.size(0)).copy_(tensor);
  return out;
}

/// [ranks, *local.sizes()]: every rank's `local`, as bytes, since backends do not know every dtype.
at::Tensor gather_whole(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim) {
  const at::Tensor input = local.contiguous();
  Sizes sizes(input.sizes().begin(), input.sizes().end());
  sizes.insert(sizes.begin(), mesh.size(mesh_dim));
  at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() > 0) {
    wait(all_gather_single(output.view(-1).view(at::kByte), input.view(-1).view(at::kByte),
                           mesh.get_group(mesh_dim)),
         "all-gather of a DTensor");
  }
  return output;
}

at::Tensor shard_to_replicate(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim,
                              int64_t dim, int64_t extent) {
  const int64_t ranks = mesh.size(mesh_dim);
  if (ranks == 1) return local;
  const at::Tensor rows = local.movedim(dim, 0);
  at::Tensor gathered =
      gather_whole(padded(rows, chunk_of(extent, ranks, 0).length), mesh, mesh_dim);
  // Only trailing ranks are short, so padding lies at the end.
  return gathered.flatten(0, 1).narrow(0, 0, extent).movedim(0, dim).contiguous();
}

/// Split along `from` (of `extent` elements) to split along `to`: every rank sends each other what
/// the two splits have in common.
at::Tensor shard_to_shard(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim,
                          int64_t from, int64_t extent, int64_t to, int64_t own_rank) {
  const int64_t ranks = mesh.size(mesh_dim);
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_counts, counts;
  std::vector<Sizes> sizes;
  const Chunk own = chunk_of(local.size(to), ranks, own_rank);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Chunk theirs = chunk_of(local.size(to), ranks, rank);
    sent.push_back(local.narrow(to, theirs.offset, theirs.length).reshape({-1}));
    sent_counts.push_back(sent.back().numel());
    sizes.emplace_back(local.sizes().begin(), local.sizes().end());
    sizes.back()[to] = own.length;
    sizes.back()[from] = chunk_of(extent, ranks, rank).length;
    counts.push_back(c10::multiply_integers(sizes.back()));
  }
  const at::Tensor input = at::cat(sent);
  const at::Tensor output =
      at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, local.options());
  wait(all_to_all_single(output, input, counts, sent_counts, mesh.get_group(mesh_dim)),
       "all-to-all of a DTensor");
  std::vector<at::Tensor> parts = output.split_with_sizes(counts);
  for (int64_t rank = 0; rank < ranks; ++rank) parts[rank] = parts[rank].view(sizes[rank]);
  return at::cat(parts, from);
}

at::Tensor all_reduced(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim,
                       ReduceOp op) {
  at::Tensor out = local.clone(at::MemoryFormat::Contiguous);
  const at::Tensor real = out.is_complex() ? at::view_as_real(out) : out;
  if (out.numel() > 0) {
    wait(all_reduce(real, op, mesh.get_group(mesh_dim)), "all-reduce of a DTensor");
  }
  return out;
}

at::Tensor partial_to_replicate(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim,
                                const Placement& partial) {
  const std::string& op = partial.reduce_op();
  if (mesh.size(mesh_dim) == 1) return local;
  if (op == "sum") return all_reduced(local, mesh, mesh_dim, ReduceOp::kSum);
  if (op == "avg") return all_reduced(local, mesh, mesh_dim, ReduceOp::kAvg);
  if (op == "norm") {
    const double order = partial.norm_order();
    const at::Tensor powers = local.to(at::kDouble).pow(order);
    return all_reduced(powers, mesh, mesh_dim, ReduceOp::kSum)
        .pow(1 / order)
        .to(local.scalar_type());
  }
  // Gathered and reduced here: backends differ on what a maximum makes of NaN and do not take every
  // dtype.
  const at::Tensor parts = gather_whole(local, mesh, mesh_dim);
  if (op == "max") return at::amax(parts, 0);
  if (op == "min") return at::amin(parts, 0);
  return parts.prod(0, false, local.scalar_type());
}

at::Tensor partial_to_shard(const at::Tensor& local, const DeviceMesh& mesh, int64_t mesh_dim,
                            ReduceOp op, int64_t dim, const Chunk& own) {
  const int64_t ranks = mesh.size(mesh_dim);
  const at::Tensor rows = local.movedim(dim, 0);
  const int64_t chunk = chunk_of(rows.size(0), ranks, 0).length;
  const at::Tensor input = padded(rows, chunk * ranks);
  Sizes sizes(input.sizes().begin(), input.sizes().end());
  sizes[0] = chunk;
  const at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() > 0) {
    wait(reduce_scatter_single(output.view(-1), input.view(-1), op, mesh.get_group(mesh_dim)),
         "reduce-scatter of a DTensor");
  }
  return output.narrow(0, 0, own.length).movedim(0, dim).contiguous();
}

/// Mesh dimensions that must pass through Replicate: those that change, and those that split
/// further what a changing one splits before or after.
std::vector<bool> changing(const Spec& from, const Spec& to) {
  const size_t count = from.placements.size();
  std::vector<bool> changes(count, false);
  for (size_t i = 0; i < count; ++i) {
    changes[i] = changes[i] || from.placements[i] != to.placements[i];
    if (!changes[i]) continue;
    for (size_t j = i + 1; j < count; ++j) {
      const Placement& inner = from.placements[j];
      if (!inner.is_shard()) continue;
      changes[j] = changes[j] || from.placements[i].is_shard(inner.dim()) ||
                   to.placements[i].is_shard(inner.dim());
    }
  }
  return changes;
}

bool has_shard(const Placements& placements, size_t begin, size_t end, int64_t dim) {
  for (size_t i = begin; i < end; ++i) {
    if (placements[i].is_shard(dim)) return true;
  }
  return false;
}

/// May mesh dimension `i` split `dim` now: outer ones that split it do so already, inner ones do
/// not yet.
bool splits_next(const Spec& now, const Spec& to, int64_t i, int64_t dim) {
  for (int64_t j = 0; j < i; ++j) {
    const bool settled = now.placements[j] == to.placements[j];
    if (!settled && (now.placements[j].is_shard(dim) || to.placements[j].is_shard(dim))) {
      return false;
    }
  }
  return !has_shard(now.placements, i + 1, now.placements.size(), dim);
}

}  // namespace

at::Tensor redistribute_local(const at::Tensor& local, c10::IntArrayRef sizes, const Spec& from,
                              const Spec& to) {
  const std::vector<bool> changes = changing(from, to);
  const auto count = static_cast<int64_t>(changes.size());
  Spec now = from;
  at::Tensor value = local;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(!to.placements[i].is_partial() || from.placements[i] == to.placements[i],
                      "redistribute from ", to_string(from.placements), " to ",
                      to_string(to.placements), ": nothing can be made Partial");
  }
  for (int64_t i = count - 1; i >= 0; --i) {  // inner splits are undone first
    if (!changes[i] || now.placements[i].is_replicate()) continue;
    const Placement placement = now.placements[i];
    const Placement& target = to.placements[i];
    // Straight into the split that is wanted, unless others of that dimension come first.
    const bool straight = target.is_shard() && now.mesh.size(i) > 1 && value.dim() > 0 &&
                          splits_next(now, to, i, target.dim());
    if (placement.is_shard()) {
      const int64_t dim = placement.dim();
      const int64_t extent = part_along(now, now.coordinate, dim, sizes[dim], i).length;
      if (straight && !has_shard(now.placements, i + 1, count, dim) && dim != target.dim()) {
        value = shard_to_shard(value, now.mesh, i, dim, extent, target.dim(), now.coordinate[i]);
        now.placements[i] = target;
        continue;
      }
      value = shard_to_replicate(value, now.mesh, i, dim, extent);
      now.placements[i] = Replicate();
      continue;
    }
    const bool linear = placement.reduce_op() == "sum" || placement.reduce_op() == "avg";
    if (straight && linear) {
      const int64_t dim = target.dim();
      const Chunk own = chunk_of(value.size(dim), now.mesh.size(i), now.coordinate[i]);
      value = partial_to_shard(value, now.mesh, i,
                               placement.reduce_op() == "avg" ? ReduceOp::kAvg : ReduceOp::kSum,
                               dim, own);
      now.placements[i] = target;
      continue;
    }
    value = partial_to_replicate(value, now.mesh, i, placement);
    now.placements[i] = Replicate();
  }
  bool cut = false;
  for (int64_t i = 0; i < count; ++i) {  // outer splits come first
    if (now.placements[i] == to.placements[i]) continue;
    const int64_t dim = to.placements[i].dim();
    const Chunk own = chunk_of(value.size(dim), now.mesh.size(i), now.coordinate[i]);
    value = value.narrow(dim, own.offset, own.length);
    now.placements[i] = to.placements[i];
    cut = true;
  }
  return cut ? value.clone(at::MemoryFormat::Contiguous) : value;
}

at::Tensor redistributed(const at::Tensor& tensor, const SpecPtr& to) {
  const SpecPtr& from = spec_of(tensor);
  if (same(from, to)) return tensor;
  TORCH_CHECK_VALUE(from->mesh == to->mesh, "a DTensor on ", from->mesh.to_string(),
                    " meets a layout on ", to->mesh.to_string(),
                    ": redistribution between meshes is not possible, take full_tensor()");
  return wrap(redistribute_local(local_of(tensor), tensor.sizes(), *from, *to), to, tensor.sizes());
}

at::Tensor finished(const at::Tensor& tensor) {
  const SpecPtr& spec = spec_of(tensor);
  if (!spec->partial) return tensor;
  const SpecPtr target = without_partial(spec);
  const std::shared_ptr<Finished>& memo = impl_of(tensor)->finished;
  const at::Tensor& local = local_of(tensor);
  const auto version = version_of(local);
  if (!memo->value.defined() || memo->version != version) {
    memo->value = redistribute_local(local, tensor.sizes(), *spec, *target);
    memo->version = version;
  }
  return wrap(memo->value, target, tensor.sizes());
}

std::vector<at::Tensor> finished(std::vector<at::Tensor> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SpecPtr spec = spec_of(tensors[i]);
    if (!spec->partial) continue;
    std::vector<size_t> alike;
    std::vector<at::Tensor> locals;
    for (size_t j = i; j < tensors.size(); ++j) {
      if (!same(spec_of(tensors[j]), spec) || tensors[j].dtype() != tensors[i].dtype()) continue;
      alike.push_back(j);
      locals.push_back(local_of(tensors[j]));
    }
    const SpecPtr target = without_partial(spec);
    const at::Tensor together = at::stack(locals);
    const at::Tensor values = redistribute_local(together, together.sizes(), *spec, *target);
    for (size_t j = 0; j < alike.size(); ++j) {
      at::Tensor& tensor = tensors[alike[j]];
      Finished& memo = *impl_of(tensor)->finished;
      memo.value = values.select(0, static_cast<int64_t>(j)).clone();
      memo.version = version_of(locals[j]);
      tensor = wrap(memo.value, target, {});
    }
  }
  return tensors;
}

}  // namespace fsdp2::dtensor
